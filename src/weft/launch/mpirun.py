"""The command line by which Open MPI's ``mpirun`` starts a job, and what its ranks are told. Pure: nothing is started.

``mpirun`` gives ranks on other hosts only the variables that are named with ``-x``, so weft's own are named, and those
that the ranks of ``weft run`` get by themselves.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from weft.errors import LaunchError
from weft.launch.discovery import MASTER, discover, port_of_job

LOOPBACK = "127.0.0.1"
_HANDED_ON = (
    "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "PYTHONPATH",
    "PYTHONUNBUFFERED",
)  # fmt: skip


def command(
    program: Sequence[str], ranks: int, environ: Mapping[str, str], exported: Sequence[str], options: str
) -> list[str]:
    """``mpirun`` with all its arguments.

    Args:
        program: What each rank runs, with its arguments.
        ranks: How many.
        environ: The environment of ``mpirun``, out of which it takes the values of variables.
        exported: Names of further variables for the ranks.
        options: More options of ``mpirun``, as one would type them.

    >>> command(["train.py"], 4, {"WEFT_SET": "{}"}, ["NCCL_DEBUG"], "-H a:2,b:2 --mca btl tcp,self")[:6]
    ['mpirun', '-np', '4', '-x', 'NCCL_DEBUG', '-x']
    """
    try:
        more = shlex.split(options)
    except ValueError as error:
        raise LaunchError(f"--mpi-options cannot be read: {error}: {options}") from None
    for option in more:
        if option in ("-n", "-np", "--np", "-c"):
            raise LaunchError(f"--mpi-options has {option}: say how many ranks with weft run -n")
    given = {more[at + 1].partition("=")[0] for at, option in enumerate(more[:-1]) if option == "-x"}
    own = [name for name in environ if name.startswith("WEFT_") or name in _HANDED_ON]
    names = [name for name in dict.fromkeys([*exported, *sorted(own)]) if name not in given]
    variables = [part for name in names for part in ("-x", name)]
    return ["mpirun", "-np", str(ranks), *variables, *more, *program]


def torchrun_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set for a rank of ``mpirun``, so that plain PyTorch finds the others.

    Empty where another launcher has told more, or this one too little.
    """
    try:
        place = discover(environ)
    except LaunchError:
        return {}  # weft.init says the same, if it is called
    if place.source != "openmpi":
        return {}
    leader = LOOPBACK if place.one_host or place.leader is None else place.leader
    numbers = {
        "RANK": place.rank, "WORLD_SIZE": place.world_size, "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size, "MASTER_PORT": port_of_job(f"{place.job} master"),
    }  # fmt: skip
    found = {name: str(value) for name, value in numbers.items()}
    return {**found, "MASTER_ADDR": leader, MASTER: f"{leader}:{found['MASTER_PORT']}"}
