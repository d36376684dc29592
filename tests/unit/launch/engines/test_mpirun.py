"""The command line of mpirun."""

from __future__ import annotations

import pytest

from tests.unit.launch.test_discovery import OPENMPI, TORCHRUN
from weft.errors import LaunchError
from weft.launch.discovery import PORTS, discover, master_given
from weft.launch.engines.mpirun import command
from weft.launch.environ import torchrun_environ


def test_the_whole_line():
    environ = {
        "PATH": "/bin",
        "WEFT_SET": '{"a": 1}',
        "WEFT_CONFIG": "job.json",
        "OMP_NUM_THREADS": "2",
        "HOME": "/",
    }
    found = command(
        ["python", "train.py", "-n", "3"], 4, environ, ["NCCL_DEBUG"], "-H a:2,b:2 --mca btl 'tcp,self'"
    )
    assert found == [
        *[
            "mpirun",
            "-np",
            "4",
            "-x",
            "NCCL_DEBUG",
            "-x",
            "OMP_NUM_THREADS",
            "-x",
            "WEFT_CONFIG",
            "-x",
            "WEFT_SET",
        ],
        *["-H", "a:2,b:2", "--mca", "btl", "tcp,self", "python", "train.py", "-n", "3"],
    ]


def test_a_variable_is_named_once():
    found = command(["x"], 1, {"WEFT_SET": "{}"}, ["A", "A", "B"], "-x B=2 -x WEFT_SET")
    assert found == ["mpirun", "-np", "1", "-x", "A", "-x", "B=2", "-x", "WEFT_SET", "x"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("-H 'a", "--mpi-options cannot be read: No closing quotation: -H 'a"),
        ("-np 3", "--mpi-options has -np: say how many ranks with weft run -n"),
    ],
)
def test_faulty_options(options, text):
    with pytest.raises(LaunchError, match=text.replace("(", r"\(")):
        command(["x"], 1, {}, [], options)


def test_ranks_of_open_mpi_get_the_variables_of_torchrun():
    found = torchrun_environ(OPENMPI)
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"
    }  # fmt: skip
    assert found["MASTER_ADDR"] == "127.0.0.1" and int(found["MASTER_PORT"]) in PORTS
    both = {**OPENMPI, **found}
    assert discover(both) == discover(OPENMPI), "weft finds the others as before"
    assert not master_given(both) and master_given({**both, "MASTER_PORT": "1"})


def test_the_first_host_is_that_of_mpirun():
    found = torchrun_environ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"})
    assert found["MASTER_ADDR"] == "192.0.2.2"
    assert int(found["MASTER_PORT"]) != discover(OPENMPI).port, "weft's own store has another one"


@pytest.mark.parametrize("environ", [{}, TORCHRUN, {"PMI_RANK": "1"}])
def test_other_ranks_keep_their_variables(environ):
    assert torchrun_environ(environ) == {}
