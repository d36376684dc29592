"""The command line of mpirun."""

from __future__ import annotations

import pytest

from weft.errors import LaunchError
from weft.launch.mpirun import command


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
