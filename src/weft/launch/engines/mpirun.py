"""The command line by which ``mpirun`` starts a job, of Open MPI or MPICH, and the variables of its ranks.

``mpirun`` gives ranks on other hosts only the variables that are named with ``-x``, so weft's own are named, and those
that the ranks of ``weft run`` get by themselves.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from weft.errors import LaunchError
from weft.launch.discovery import LEADER, port_of_job
from weft.launch.engines.described import Described
from weft.launch.engines.local import rank_program
from weft.launch.engines.plan import Command, Plan

HANDED_ON = (
    "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "PYTHONPATH",
    "PYTHONUNBUFFERED",
)  # fmt: skip
_OPEN_MPI_4 = (
    "--mca", "orte_abort_on_non_zero_status", "1", "--mca", "oob_tcp_keepalive_time", "10",
    "--mca", "oob_tcp_keepalive_intvl", "5", "--mca", "oob_tcp_keepalive_probes", "3",
)  # fmt: skip
"""Open MPI 4 notices after 25 s, and not after 8 min, that a host is gone, as long as it has sent nothing there since;
`weft.watch.sidecar` does the rest. Open MPI 5 has other names for all that."""


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """One ``mpirun`` on this host, which starts the ranks of all hosts."""
    make = _mpich if job.form == "mpich" else _open_mpi
    return Plan(job.engine, [make(job, environ)], environ=environ)


def _open_mpi(job: Described, environ: Mapping[str, str]) -> Command:
    if job.host_names:
        slots = [f"{host}:{job.ranks_per_host}" for host in job.host_names]
        where = ["--host", ",".join(slots), "--map-by", "slot"]
    else:
        where = ["--map-by", f"ppr:{job.ranks_per_host}:node"] if job.host_count > 1 else []
    more = [
        *where,
        *_logs(job),
        *(_OPEN_MPI_4 if job.form == "openmpi4" and job.host_count > 1 else ()),
        *job.mpi_options,
    ]
    line = command(rank_program(job), job.ranks, environ, [*environ], shlex.join(more))
    return Command(line, environ=environ)


def _logs(job: Described) -> list[str]:
    """The options that write each rank's output into files, too."""
    if not job.log_dir:
        return []
    if job.form == "openmpi4":
        return ["--output-filename", f"{job.log_dir}:nojobid"]
    return ["--output", f"dir={job.log_dir}"]


def _mpich(job: Described, environ: Mapping[str, str]) -> Command:
    where: list[str] = []
    if job.host_count > 1:
        leader = f"{job.host_names[0].rpartition('@')[2]}:{port_of_job(job.name)}"
        environ = {LEADER: leader, **environ}
        where = ["-hosts", ",".join(job.host_names)]
    elif job.host_names:
        where = ["-hosts", job.host_names[0]]
    names = ["-genvlist", ",".join(sorted(environ))] if environ else []
    line = ["mpiexec", "-n", str(job.ranks), "-ppn", str(job.ranks_per_host), *where, *names]
    return Command([*line, *job.mpi_options, *rank_program(job)], environ=environ)


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
    more = options_of(options)
    given = {more[at + 1].partition("=")[0] for at, option in enumerate(more[:-1]) if option == "-x"}
    own = [name for name in environ if name.startswith("WEFT_") or name in HANDED_ON]
    names = [name for name in dict.fromkeys([*exported, *sorted(own)]) if name not in given]
    variables = [part for name in names for part in ("-x", name)]
    return ["mpirun", "-np", str(ranks), *variables, *more, *program]


def options_of(text: str) -> list[str]:
    """Further arguments of ``mpirun``, as one would type them.

    Raises:
        LaunchError: Quotes do not close, or it says how many ranks there are.
    """
    try:
        more = shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"--mpi-options cannot be read: {error}: {text}") from None
    for option in more:
        if option in ("-n", "-np", "--np", "-c"):
            raise LaunchError(f"--mpi-options has {option}: say how many ranks with weft run -n")
    return more
