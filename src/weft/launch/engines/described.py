"""A job as a value: the script, where its ranks are, and their variables.

Whatever is wrong with it is said when it is made.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePath
from typing import Any

from weft.config import resolve
from weft.errors import ConfigError, LaunchError
from weft.untrusted import MOST_RANKS, shown, shown_text

FORMS = {
    "local": ("",),
    "ssh": ("",),
    "torchrun": ("",),
    "mpirun": ("openmpi4", "openmpi5", "mpich"),
    "slurm": ("",),
    "ray": ("",),
    "kubernetes": ("trainjob", "jobset"),
    "skypilot": ("",),
}
"""The engines, and for each the forms that it has; the first one is taken if none is given."""
PYTHON = "python"
RESTARTING = ("local", "ssh", "torchrun", "slurm", "ray", "kubernetes")
TIMED = ("slurm", "kubernetes")
WITH_GPUS = ("slurm", "ray", "kubernetes", "skypilot")
"""Engines that are asked for GPUs; ranks of the others take those that they see."""
_NEEDS_NAMES = ("ssh", "torchrun")
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KIND = re.compile(r"[A-Za-z0-9._-]*")
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,40}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Described:
    """See :class:`weft.launch.job.Job`."""

    script: str = field(kw_only=False)
    arguments: Sequence[str] = field(default=(), kw_only=False, repr=False)
    module: bool = False
    hosts: int | Sequence[str] = 1
    ranks_per_host: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    hand_on: Sequence[str] = ()
    engine: str = "local"
    form: str = ""
    name: str = ""
    time_limit: timedelta | None = None
    max_restarts: int = 0
    log_dir: str = ""
    folder: str = "."
    python: str = PYTHON
    image: str = ""
    gpus_per_host: int = 0
    gpu_kind: str = ""
    mpi_options: Sequence[str] = field(default=(), repr=False)
    ssh_options: Sequence[str] = ()
    min_hosts: int = 0

    def __post_init__(self) -> None:
        if faults := [*_kind_faults(self)] or [*_faults(self)]:
            raise LaunchError("; ".join(faults))
        try:
            resolve(self.settings, {}, self.ranks)
        except ConfigError as error:
            raise LaunchError(f"settings of the job: {error}") from error
        object.__setattr__(self, "name", self.name or _derived_name(self))
        object.__setattr__(self, "form", self.form or FORMS[self.engine][0])

    @property
    def host_count(self) -> int:
        """The number of hosts."""
        return self.hosts if isinstance(self.hosts, int) else len(self.hosts)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Their names; none if only their number is known."""
        return () if isinstance(self.hosts, int) else tuple(self.hosts)

    @property
    def ranks(self) -> int:
        """The number of ranks, on all hosts."""
        return self.host_count * self.ranks_per_host

    @property
    def program(self) -> list[str]:
        """The script and its arguments, as Python or torchrun takes them."""
        return [*(("-m",) if self.module else ()), self.script, *self.arguments]


def is_host(name: str) -> bool:
    """True if this can be the name of a host, or ``user@host``, and nothing that a command takes for an option.

    >>> is_host("node-1.lan"), is_host("me@node1"), is_host("-oProxyCommand=x")
    (True, True, False)
    """
    return _HOST.fullmatch(name) is not None


def _kind_faults(job: Described) -> Iterator[str]:
    """Values of another kind than is said above: texts are no lists of texts, and numbers are no texts."""
    for name in ("script", "engine", "form", "name", "log_dir", "folder", "python", "image", "gpu_kind"):
        if not isinstance(getattr(job, name), str):
            yield f"{name} is {shown(getattr(job, name))}: give a text"
    for name in ("arguments", "hand_on", "mpi_options", "ssh_options"):
        value = getattr(job, name)
        if (
            isinstance(value, str)
            or not isinstance(value, Sequence)
            or not all(isinstance(each, str) for each in value)
        ):
            yield f"{name} is {shown(value)}: give a list of texts"
    for name in ("settings", "variables"):
        if not isinstance(getattr(job, name), Mapping):
            yield f"{name} is {shown(getattr(job, name))}: give a dict"
        elif not all(isinstance(each, str) for each in getattr(job, name)):
            yield f"{name} has names that are no texts"


def _faults(job: Described) -> Iterator[str]:
    if job.engine not in FORMS:
        yield f"engine is {shown(job.engine)}: it is one of {', '.join(FORMS)}"
    elif job.form and job.form not in FORMS[job.engine]:
        forms = ", ".join(filter(None, FORMS[job.engine]))
        yield f"form is {shown(job.form)}: {job.engine} has {forms or 'no forms, leave it out'}"
    if not job.script or job.script.startswith("-"):
        yield f"script is {shown(job.script)}: give a file, or a module with module=True"
    if job.name and not _NAME.fullmatch(job.name):
        yield f"name is {shown(job.name)}: write small letters, digits and hyphens, 42 at most, a letter first"
    yield from _number_faults(job)
    yield from _host_faults(job)
    yield from _text_faults(job)
    if job.engine == "kubernetes" and not job.image:
        yield 'the engine kubernetes runs an image: give one, for example image="registry/train:1"'


def _number_faults(job: Described) -> Iterator[str]:
    for name, value, least in (
        ("ranks_per_host", job.ranks_per_host, 1),
        ("max_restarts", job.max_restarts, 0),
        ("gpus_per_host", job.gpus_per_host, 0),
        ("min_hosts", job.min_hosts, 0),
    ):
        if type(value) is not int or not least <= value <= MOST_RANKS:
            yield f"{name} is {shown(value)}: write a whole number of at least {least}"
    if job.time_limit is not None and job.time_limit < timedelta(minutes=1):
        yield f"time_limit is {job.time_limit}: give a minute at least, for example timedelta(hours=2)"
    if job.time_limit is not None and job.engine in FORMS and job.engine not in TIMED:
        yield f"time_limit is {job.time_limit}: the engine {job.engine} has none; leave it out"
    if job.max_restarts and job.engine in FORMS and job.engine not in RESTARTING:
        yield f"max_restarts is {shown(job.max_restarts)}: the engine {job.engine} starts nothing again; leave it out"
    if job.min_hosts and job.engine != "ssh":
        yield f"min_hosts is {shown(job.min_hosts)}: only the engine ssh goes on with fewer hosts; leave it out"
    elif job.min_hosts and not job.max_restarts:
        yield f"min_hosts is {shown(job.min_hosts)}: nothing is started again without max_restarts; give both"
    elif type(job.min_hosts) is int and job.min_hosts > job.host_count:
        yield f"min_hosts is {shown(job.min_hosts)}: there are {job.host_count} hosts"
    if job.gpu_kind and (job.engine != "skypilot" or not job.gpus_per_host):
        yield f"gpu_kind is {shown(job.gpu_kind)}: it is for the engine skypilot, with gpus_per_host; leave it out"
    elif not _KIND.fullmatch(job.gpu_kind):
        yield f"gpu_kind is {shown(job.gpu_kind)}: write the name of an accelerator, for example A100"
    elif job.engine == "skypilot" and job.gpus_per_host and not job.gpu_kind:
        yield f"gpus_per_host is {shown(job.gpus_per_host)}: SkyPilot wants their kind, too, for example A100"
    if job.gpus_per_host and job.engine in FORMS and job.engine not in WITH_GPUS:
        yield (
            f"gpus_per_host is {shown(job.gpus_per_host)}: ranks of the engine {job.engine} take the GPUs that they "
            "see; leave it out"
        )


def _host_faults(job: Described) -> Iterator[str]:
    if isinstance(job.hosts, (int, str)):
        if type(job.hosts) is not int or not 1 <= job.hosts <= MOST_RANKS:
            yield f'hosts is {shown(job.hosts)}: write how many, or a list of names, for example ["node1", "node2"]'
        elif job.hosts > 1 and job.engine in _NEEDS_NAMES:
            yield f"hosts is {job.hosts}: the engine {job.engine} needs their names"
        elif job.hosts > 1 and job.engine == "mpirun" and job.form == "mpich":
            yield f"hosts is {job.hosts}: MPICH needs their names, the first of which has rank 0"
    else:
        if not job.hosts:
            yield "hosts is empty: name one at least"
        for name in job.hosts:
            if not isinstance(name, str) or not is_host(name):
                yield f"{shown(name)} is no name of a host: write letters, digits, dots and hyphens"
        if len({*job.hosts}) < len(job.hosts):
            yield f"hosts has a name twice: {', '.join(map(shown_text, job.hosts))}"
    if job.engine == "local" and job.hosts != 1:
        yield "the engine local has one host: leave hosts out, or choose another engine"


def _text_faults(job: Described) -> Iterator[str]:
    for name in [*job.variables, *job.hand_on]:
        if not _VARIABLE.fullmatch(name):
            yield f"{shown(name)} is no name of a variable"
    texts = [
        job.script,
        *job.arguments,
        *job.variables.values(),
        *job.mpi_options,
        *job.ssh_options,
        job.log_dir,
        job.folder,
        job.python,
    ]
    for text in texts:
        if not isinstance(text, str) or "\0" in text:
            yield f"{shown(text)} can be no argument and no variable: give a text without the character 0"
    for name, text in (("log_dir", job.log_dir), ("script", job.script), ("image", job.image)):
        if any(ord(letter) < 32 for letter in str(text)):
            yield f"{name} is {shown(text)}: it has a line break or another control character"


def _derived_name(job: Described) -> str:
    stem = job.script.rpartition(".")[2] if job.module else PurePath(job.script).stem
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-0123456789")[:40].strip("-")
    return plain or f"job-{hashlib.sha256(job.script.encode(errors='replace')).hexdigest()[:8]}"
