"""The table of launchers in `weft.launch.discovery`, row by row."""

from __future__ import annotations

import re

import pytest

from weft.errors import LaunchError
from weft.launch.discovery import Place, discover, expand_hosts

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "2032730112.0;tcp://192.0.2.2,10.0.0.2:32769;tcp6://[fd00::2]:58813",
    "PMIX_NAMESPACE": "2032730113",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_ID": "41000",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def numbers(place: Place) -> tuple[int, int, int, int]:
    return place.rank, place.world_size, place.local_rank, place.local_size


def test_nothing_means_a_single_process():
    place = discover({"PATH": "/bin"})
    assert place == Place(0, 1, 0, 1, "single")
    assert not place.launched and place.one_host


def test_torchrun():
    place = discover(TORCHRUN)
    assert numbers(place) == (3, 4, 1, 2)
    assert (place.source, place.leader, place.port) == ("torchrun", "node0", 29500)
    assert place.agent and place.launched and not place.one_host


def test_a_restart_is_another_job():
    assert discover(TORCHRUN).job != discover({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).job


def test_variables_set_by_hand_have_no_agent_and_no_launcher():
    place = discover({name: text for name, text in TORCHRUN.items() if "ELASTIC" not in name})
    assert place.source == "torchrun" and not place.agent and not place.launched


def test_weft_run():
    place = discover({**TORCHRUN, "WEFT_SHARED_FD": "7"})
    assert (place.source, place.shared_fd, place.launched) == ("weft", 7, True)


ENV = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize("more", [{}, {"LOCAL_RANK": "0"}, {"LOCAL_WORLD_SIZE": "1"}])
def test_launchers_that_say_nothing_of_hosts(more):
    """Kubeflow's PyTorchJob sets these four."""
    place = discover({**ENV, **more})
    assert (place.source, place.rank, place.world_size, place.local_size) == ("env", 1, 2, 0)
    assert (place.leader, place.port) == ("job-master-0", 23456)
    assert not place.launched and not place.one_host


def test_one_process_needs_no_others_to_know_its_host():
    assert discover({**ENV, "RANK": "0", "WORLD_SIZE": "1"}).one_host


def test_a_rank_that_does_not_fit_without_hosts():
    with pytest.raises(LaunchError, match="RANK=2 does not fit WORLD_SIZE=2"):
        discover({**ENV, "RANK": "2"})


def test_complete_variables_of_another_launcher_win():
    assert discover({**ENV, **OPENMPI}).source == "openmpi"


def test_openmpi():
    place = discover(OPENMPI)
    assert numbers(place) == (1, 2, 1, 2)
    assert (place.source, place.leader) == ("openmpi", "192.0.2.2")
    assert place.port in range(20000, 40000)
    other = discover({**OPENMPI, "PMIX_NAMESPACE": "2032730114"})
    assert (other.job, other.port) != (place.job, place.port)


@pytest.mark.parametrize(
    ("uri", "leader"),
    [
        ("1.0;tcp://10.1.2.3:4711", "10.1.2.3"),
        ("1.0;tcp://10.1.2.3,192.168.0.1:4711", "10.1.2.3"),
        ("1.0;tcp6://[fd00::2]:4711", "fd00::2"),
        ("", None),
        ("nonsense", None),
    ],
)
def test_the_leader_of_openmpi(uri: str, leader: str | None):
    assert discover({**OPENMPI, "OMPI_MCA_orte_hnp_uri": uri}).leader == leader


def test_mpich_on_one_host_and_on_several():
    assert numbers(discover(MPICH)) == (0, 2, 0, 2)
    spread = {**MPICH, "MPI_LOCALNRANKS": "1"}
    with pytest.raises(LaunchError, match=r"mpich does not say where rank 0 runs.*set WEFT_LEADER=host:port"):
        discover(spread)
    place = discover({**spread, "WEFT_LEADER": "[fd00::1]:29500"})
    assert (place.leader, place.port) == ("fd00::1", 29500)


def test_a_slurm_step():
    place = discover(SLURM)
    assert numbers(place) == (5, 6, 1, 2)
    assert (place.source, place.leader, place.port) == ("slurm", "gpu07", 21002)


def test_the_batch_script_of_a_slurm_job_is_no_rank():
    assert (
        discover({name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}).source == "single"
    )


def test_launchers_that_agree_are_fine():
    same = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert discover({**OPENMPI, **same}).source == "torchrun"


def test_launchers_that_disagree_are_both_named():
    other = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(
        LaunchError,
        match=r"torchrun says rank 0 of 1 \(RANK, WORLD_SIZE\), openmpi says rank 1 of 2 \(OMPI_COMM",
    ):
        discover({**OPENMPI, **other})
    with pytest.raises(LaunchError, match="openmpi says rank 1 of 2 .*, slurm says rank 5 of 6"):
        discover({**OPENMPI, **SLURM})


def test_a_launcher_inside_another_one_counts():
    assert discover({**SLURM, **TORCHRUN}).source == "torchrun"
    assert discover({**OPENMPI, **TORCHRUN, "WEFT_SHARED_FD": "7"}).source == "weft"
    daemon = {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert discover({**daemon, "SLURM_STEP_TASKS_PER_NODE": "1", **OPENMPI}).source == "openmpi"


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK and WORLD_SIZE set, but not LOCAL_RANK and LOCAL_WORLD_SIZE",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK set, but not OMPI_COMM_WORLD_SIZE and"),
        ({**TORCHRUN, "RANK": "x"}, 'RANK is "x": it must be a whole number'),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, 'LOCAL_RANK is "-1": it must be a whole number from 0'),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 does not fit WORLD_SIZE=4"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, 'MASTER_PORT is "http"'),
        ({**TORCHRUN, "WEFT_SHARED_FD": "x"}, 'WEFT_SHARED_FD is "x"'),
        ({**TORCHRUN, "WEFT_LEADER": "node0"}, 'WEFT_LEADER is "node0": write it as host:port'),
        ({**TORCHRUN, "WEFT_LEADER": "node0:99999"}, 'WEFT_LEADER is "node0:99999"'),
        ({**SLURM, "SLURM_JOB_ID": "x"}, 'SLURM_JOB_ID is "x": it must be a whole number'),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4;2"}, 'SLURM_STEP_TASKS_PER_NODE is "4;2"'),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
            "this step of Slurm has 1 of the 6 tasks that were asked for "
            "(SLURM_STEP_NUM_TASKS=1, SLURM_NTASKS=6): "
            "start the ranks with `srun -n 6`, or unset SLURM_STEP_ID for a single process",
        ),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 does not fit SLURM_STEP_TASKS_PER_NODE=4,2"),
    ],
)
def test_faults_are_named(environ: dict[str, str], text: str):
    with pytest.raises(LaunchError, match=re.escape(text)):
        discover(environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7]", ["gpu01", "gpu02", "gpu03", "gpu7"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[0,2],x", ["r1n0", "r1n2", "r2n0", "r2n2", "x"]),
        ("n[1-2]-ib.cluster", ["n1-ib.cluster", "n2-ib.cluster"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["gpu[1-", "gpu]1[", "a,,b", "gpu[-3]", "gpu[1-2-3]"])
def test_broken_node_lists(text: str):
    with pytest.raises(LaunchError, match="cannot be read"):
        list(expand_hosts(text))


def test_a_token_comes_from_its_variable_or_from_open_mpi_and_is_not_shown():
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    environ = {f"OMPI_COMM_WORLD_{name}": text for name, text in zip(names, "1212", strict=True)}
    environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    place = discover({**environ, "OMPI_MCA_orte_precondition_transports": "its-key"})
    assert place.token == "its-key" and "its-key" not in repr(place)
    assert (
        discover({**environ, "OMPI_MCA_orte_precondition_transports": "k", "WEFT_TOKEN": "mine"}).token
        == "mine"
    )
