"""The command line by which Open MPI's ``mpirun`` starts a job. Pure: nothing is started here.

``mpirun`` gives ranks on other hosts only the variables that are named with ``-x``, so weft's own are named, and those
that the ranks of ``weft run`` get by themselves.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from weft.errors import LaunchError

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
