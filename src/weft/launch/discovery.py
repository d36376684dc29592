"""The rank and job of this process, read from the variables that its launcher set.

    source     rank, world size, local rank, local size                        leader
    weft       RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE + WEFT_SHARED_FD     (the launcher hands it over)
    torchrun   RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE                      MASTER_ADDR MASTER_PORT
    env        RANK WORLD_SIZE (who shares a host is found out by its name)     MASTER_ADDR MASTER_PORT
    openmpi    OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}                host of OMPI_MCA_orte_hnp_uri
    mpich      PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS                WEFT_LEADER
    slurm      SLURM_PROCID SLURM_NTASKS SLURM_LOCALID (inside a step only)     first of SLURM_STEP_NODELIST
    single     none of these                                                    none

`WEFT_LEADER=host:port` says where rank 0 listens, whatever the source. This module is handed the
environment and reads none itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.errors import LaunchError
from weft.untrusted import LARGEST, MOST_RANKS, shown_text, whole

SHARED_FD = "WEFT_SHARED_FD"
"""The variable with the number of the file descriptor that `weft run` shares with its ranks."""

LEADER = "WEFT_LEADER"
"""Where rank 0 listens, whatever the launcher: ``host:port``."""
MASTER = "WEFT_MASTER"
"""The variable with the host and port that `weft run` has put into MASTER_ADDR and MASTER_PORT."""

REPLICA = "WEFT_REPLICA"
"""With ``min_replicas``: which replica the process belongs to, and the memory in which replicas meet."""
TOKEN = "WEFT_TOKEN"
"""The variable with the secret of a job over several hosts."""
_MPI_KEY = "OMPI_MCA_orte_precondition_transports"
"""128 random bits that Open MPI's mpirun hands to the ranks of one job."""

PORTS = range(20000, 40000)
"""Where a port is derived from a job's number, it is one of these."""

_MOST_BRACKETS = 8


@dataclass(frozen=True)
class Place:
    """One process of a job.

    Attributes:
        local_size: How many of the processes run on this host; 0 while it is unknown, as is `local_rank`.
        source: Who started it: weft, torchrun, env, openmpi, mpich, slurm or single.
        leader: The host of rank 0, if the launcher gives it.
        port: The port that rank 0 (or torchrun's agent) listens on, if the launcher gives it.
        job: An id that no other job has, not even a restart of this one.
        agent: A store of the launcher's own listens at `leader` and `port`.
        shared_fd: The file descriptor of the memory that `weft run` shares with its ranks.
        token: A secret that only the job's processes know, where several hosts need one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    source: str = "single"
    leader: str | None = None
    port: int | None = None
    job: str = field(default="", repr=False)
    agent: bool = False
    shared_fd: int | None = None
    token: str = field(default="", repr=False)

    @property
    def one_host(self) -> bool:
        return self.local_size == self.world_size

    @property
    def launched(self) -> bool:
        """The parent process is a launcher, so that this process should end with it."""
        return self.source not in ("single", "torchrun", "env") or self.agent


@dataclass(frozen=True)
class _Source:
    """The variables of one launcher; `needs` must be set for the others to count."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    needs: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.rank, self.world_size, self.local_rank, self.local_size)


_EXPLICIT = _Source("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = _Source(
    "openmpi", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
_MPICH = _Source("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Source(
    "slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID"
)
_SOURCES = (_EXPLICIT, _OPENMPI, _MPICH, _SLURM)
_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What PyTorch's ``env://`` needs, and many launchers (Kubeflow's, say) set no more."""


def discover(environ: Mapping[str, str]) -> Place:
    """The place of this process in its job; the first complete set of variables counts.

    Raises:
        LaunchError: Two launchers disagree, a set is incomplete, or a value makes no sense.

    >>> discover({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).rank
    1
    """
    complete = []
    incomplete = []
    for source in _SOURCES:
        present = [name for name in source.names if environ.get(name)]
        if source.needs is not None and not environ.get(source.needs):
            continue
        if (
            source is _EXPLICIT
            and not (environ.get(SHARED_FD) or master_given(environ))
            and MASTER in environ
        ):
            continue  # weft has made them from another launcher's
        if len(present) == len(source.names):
            complete.append((source, _numbers(source, environ)))
        elif present:
            missing = [name for name in source.names if name not in present]
            incomplete.append(f"{' and '.join(present)} set, but not {' and '.join(missing)}")
    if not complete:
        if all(environ.get(name) for name in _ENV):
            return _with_leader(_without_hosts(environ), environ)
        if incomplete:
            raise LaunchError(
                f"the launcher's variables are incomplete: {'; '.join(incomplete)}. Start the script with "
                "`weft run -n N`, torchrun, mpirun or srun, or unset them for a single process"
            )
        return Place()
    _refuse_rivals(complete, environ)
    source, place = complete[0]
    shared = environ.get(SHARED_FD, "")
    if source is _EXPLICIT and shared:
        place = replace(place, source="weft", shared_fd=_whole(SHARED_FD, shared))
        return place if place.one_host else _over_hosts(place, environ)
    return _with_leader(replace(place, source=source.name), environ)


def _over_hosts(place: Place, environ: Mapping[str, str]) -> Place:
    """The place of a rank of `weft run` on one of several hosts: the launcher gives the first host's address."""
    return replace(place, leader=environ.get("MASTER_ADDR") or None, token=environ.get(TOKEN, ""))


def master_given(environ: Mapping[str, str]) -> bool:
    """True if MASTER_ADDR is there, and not only because `weft run` has set it.

    >>> master_given({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4", "WEFT_MASTER": "127.0.0.1:4"})
    False
    """
    address = environ.get("MASTER_ADDR")
    return bool(address) and f"{address}:{environ.get('MASTER_PORT')}" != environ.get(MASTER)


def _numbers(source: _Source, environ: Mapping[str, str]) -> Place:
    def whole(name: str) -> int:
        text = environ[name]
        if name == _SLURM.local_size:
            return _slurm_local_size(text, environ.get("SLURM_NODEID", "0"))
        return _whole(name, text)

    rank, world_size, local_rank, local_size = (whole(name) for name in source.names)
    for name, number, limit_name, limit in (
        (source.rank, rank, source.world_size, world_size),
        (source.local_rank, local_rank, source.local_size, local_size),
        (source.local_size, local_size - 1, source.world_size, world_size),
    ):
        if not 0 <= number < limit:
            raise LaunchError(f"{name}={environ[name]} does not fit {limit_name}={environ[limit_name]}")
    return Place(rank, world_size, local_rank, local_size)


def _without_hosts(environ: Mapping[str, str]) -> Place:
    """The place of a process that does not know how many others share its host."""
    rank, world_size = (_whole(name, environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if rank >= world_size:
        raise LaunchError(f"RANK={environ['RANK']} does not fit WORLD_SIZE={environ['WORLD_SIZE']}")
    return Place(rank, world_size, 0, 1 if world_size == 1 else 0, "env")


def _whole(name: str, text: str, most: int = MOST_RANKS) -> int:
    """The number in a variable of a launcher."""
    value = whole(text.strip(), most)
    if value is None:
        raise LaunchError(f'{name} is "{shown_text(text)}": it must be a whole number from 0 to {most}')
    return value


def _refuse_rivals(complete: list[tuple[_Source, Place]], environ: Mapping[str, str]) -> None:
    """Two sets of variables that disagree are an error, unless one launcher plainly started the other one."""
    (first, place), *rest = complete
    if first is _EXPLICIT and (environ.get(SHARED_FD) or environ.get("TORCHELASTIC_RUN_ID")):
        return
    for other, rival in rest:
        if (place.rank, place.world_size) == (rival.rank, rival.world_size):
            continue
        if other is _SLURM and first is not _EXPLICIT and rival.world_size <= place.world_size:
            continue  # mpirun starts its daemons, not its ranks, as tasks of a Slurm step
        raise LaunchError(
            f"two launchers disagree: {first.name} says rank {place.rank} of {place.world_size} "
            f"({first.rank}, {first.world_size}), {other.name} says rank {rival.rank} of {rival.world_size} "
            f"({other.rank}, {other.world_size}); unset the variables of the one that did not start this"
        )


def _with_leader(place: Place, environ: Mapping[str, str]) -> Place:
    """`place` with what is known of its job and of where rank 0 listens."""
    place = replace(place, token=environ.get(TOKEN) or environ.get(_MPI_KEY, ""))
    finders = {"torchrun": _torchrun, "env": _torchrun, "openmpi": _openmpi, "mpich": _mpich, "slurm": _slurm}
    if place.source in finders:
        place = finders[place.source](place, environ)
    leader = environ.get(LEADER)
    if leader:
        host, colon, port = leader.rpartition(":")
        number = whole(port, 65535)
        if not colon or not host or not number:
            raise LaunchError(
                f'WEFT_LEADER is "{shown_text(leader)}": write it as host:port, for example 10.0.0.1:29500'
            )
        place = replace(place, leader=host.strip("[]"), port=number, agent=False)
    if place.world_size > 1 and not place.one_host and (place.leader is None or place.port is None):
        raise LaunchError(
            f"{place.source} does not say where rank 0 runs, and this job spans hosts: "
            "set WEFT_LEADER=host:port, for example WEFT_LEADER=10.0.0.1:29500, on all ranks"
        )
    return place


def _torchrun(place: Place, environ: Mapping[str, str]) -> Place:
    port = environ.get("MASTER_PORT", "")
    parts = [environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "0")]
    return replace(
        place,
        leader=environ.get("MASTER_ADDR") or None,
        port=_whole("MASTER_PORT", port, 65535) if port else None,
        job=":".join([*parts, environ.get("MASTER_ADDR", ""), port]),
        agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _openmpi(place: Place, environ: Mapping[str, str]) -> Place:
    """Open MPI gives each job a number, a random key, and the address of mpirun: `job.0;tcp://ip[,ip]:port`."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.match(r"[^;]*;(?:tcp://([0-9.]+)|tcp6://\[([0-9A-Fa-f:.]+))[],:]", uri)
    names = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports")
    job = ":".join([uri, *(environ.get(name, "") for name in names)])
    return replace(
        place, leader=found and (found[1] or found[2]), port=port_of_job(job) if found else None, job=job
    )


def _mpich(place: Place, environ: Mapping[str, str]) -> Place:
    names = ("PMI_PORT", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return replace(place, job=":".join(environ.get(name, "") for name in names))


def _slurm(place: Place, environ: Mapping[str, str]) -> Place:
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks and _whole("SLURM_STEP_NUM_TASKS", tasks) < place.world_size and "SLURM_HET_SIZE" not in environ:
        raise LaunchError(
            f"this step of Slurm has {tasks} of the {place.world_size} tasks that were asked for "
            f"(SLURM_STEP_NUM_TASKS={tasks}, SLURM_NTASKS={place.world_size}): start the ranks with `srun -n "
            f"{place.world_size}`, or unset SLURM_STEP_ID for a single process"
        )
    number, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "")
    both = _whole("SLURM_JOB_ID", number, LARGEST) + _whole("SLURM_STEP_ID", step, LARGEST)
    port = PORTS.start + both % len(PORTS)
    return replace(place, leader=next(hosts, None), port=port, job=f"{number}.{step}")


def port_of_job(job: str) -> int:
    """A port that follows from what only this job has."""
    return PORTS.start + int(hashlib.sha256(job.encode()).hexdigest()[:8], 16) % len(PORTS)


def _slurm_local_size(text: str, node: str) -> int:
    """The number of tasks on this node, from counts such as `4(x3),2`."""
    wanted, before = _whole("SLURM_NODEID", node), 0
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        tasks, nodes = (
            (whole(found[1], MOST_RANKS), whole(found[2] or "1", MOST_RANKS)) if found else (None, None)
        )
        if tasks is None or nodes is None:
            raise LaunchError(
                f'SLURM_STEP_TASKS_PER_NODE is "{shown_text(text)}": it must look like 4(x3),2, with numbers up to '
                f"{MOST_RANKS}"
            )
        before += nodes
        if wanted < before:
            return tasks
    raise LaunchError(f"SLURM_NODEID={node} does not fit SLURM_STEP_TASKS_PER_NODE={shown_text(text)}")


def expand_hosts(text: str) -> Iterator[str]:
    """The hosts of a Slurm node list, one after the other, however many there are.

    >>> list(expand_hosts("gpu[01-03,7],login"))
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    >>> list(expand_hosts("rack[1-2]n[0-1]"))
    ['rack1n0', 'rack1n1', 'rack2n0', 'rack2n1']
    >>> next(expand_hosts("a[1-99999999999]"))
    'a1'
    """
    names = re.findall(r"(?:[^,\[\]]|\[[0-9,-]+\])+", text)
    if ",".join(names) != text:
        raise LaunchError(
            f'the node list "{shown_text(text)}" cannot be read: it must look like gpu[01-03,7],login'
        )
    for name in names:
        parts = re.split(r"\[([0-9,-]+)\]", name)  # text, ranges, text, ranges, ..., text
        numbers = [_numbered(name, ranges) for ranges in parts[1::2]]
        if len(numbers) > _MOST_BRACKETS:
            raise LaunchError(
                f'the node list "{shown_text(name)}" cannot be read: a name has {len(numbers)} pairs of brackets, '
                f"and up to {_MOST_BRACKETS} are understood"
            )
        for chosen in _combined(numbers):
            yield parts[0] + "".join(map("".join, zip(chosen, parts[2::2], strict=True)))


def _numbered(name: str, ranges: str) -> list[tuple[range, int]]:
    """The ranges in a pair of brackets, each with the digits that its numbers have."""
    found = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        begin, end = whole(first), whole(last if dash else first)
        if begin is None or end is None:
            raise LaunchError(
                f'the node list "{shown_text(name)}" cannot be read: "{shown_text(part)}" is no range'
            )
        found.append((range(begin, end + 1), len(first)))
    return found


def _combined(numbers: Sequence[list[tuple[range, int]]]) -> Iterator[tuple[str, ...]]:
    """Every choice of one number from each pair of brackets, the last one changing fastest."""
    if not numbers:
        yield ()
        return
    for span, digits in numbers[0]:
        for number in span:
            for rest in _combined(numbers[1:]):
                yield (f"{number:0{digits}d}", *rest)
