"""The environment of a rank that `weft run` starts, as that of torchrun's ranks."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from weft.errors import LaunchError
from weft.launch.discovery import MASTER, discover, port_of_job

LOOPBACK = "127.0.0.1"
ATTEMPT = "WEFT_ATTEMPT"
"""The variable that says how often the job was started before."""
TRIAL = "WEFT_TRIAL"
"""The variable with the folder of a trial of `weft tune`, set for trials only."""
_KEPT_MEMORY = str(1 << 30)
RANK_DEFAULTS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": _KEPT_MEMORY,
    "MALLOC_TRIM_THRESHOLD_": _KEPT_MEMORY,
    "PYTHONUNBUFFERED": "1",
}
"""Variables that every rank has, unless they are set."""


def rank_environ(
    environ: Mapping[str, str], rank: int, ranks: int, cores: int, hosts: int = 1
) -> dict[str, str]:
    """The variables of one rank; each host has as many ranks, and the first host the first ones.

    Threads share the cores. glibc keeps freed memory: giving large tensors back to the system and
    taking them again costs several percent of a step. See ``weft.runtime.allocator``.
    """
    here = ranks // hosts
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // here)), **RANK_DEFAULTS}
    own = {
        "RANK": rank, "LOCAL_RANK": rank % here, "ROLE_RANK": rank, "GROUP_RANK": rank // here,
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here, "ROLE_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": hosts,
        "ROLE_NAME": "default",
    }  # fmt: skip
    return {**defaults, **environ, **{name: str(value) for name, value in own.items()}}


def master_environ(port: int, address: str = LOOPBACK) -> dict[str, str]:
    """The variables by which PyTorch's ``env://`` finds rank 0, which holds the store: there is no agent that does.

    Lightning takes a process for one of several by the name of the run.
    """
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        MASTER: f"{address}:{port}",
        "TORCHELASTIC_RUN_ID": "weft",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def attempt_environ(attempt: int, restarts: int) -> dict[str, str]:
    """The variables that say how often the job was started before, and how often it may be started again."""
    return {
        ATTEMPT: str(attempt),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
    }


def free_port(address: str = LOOPBACK) -> tuple[socket.socket, dict[str, str]]:
    """A port for rank 0 at an address of this host, and the variables that name it.

    The socket has the port without listening there. Until it is closed nobody gets that port by chance, but rank 0,
    which asks for it and lets addresses be used again, as PyTorch's store does, gets it.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((address, 0))
    except OSError as error:
        held.close()
        raise LaunchError(f"there is no free port on {address} for rank 0: {error}") from error
    return held, master_environ(held.getsockname()[1], address)


def torchrun_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set for a rank of ``mpirun``, so that plain PyTorch finds the others.

    Empty where another launcher has set more, or this one too little.
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
