"""Where `weft run` starts a job: options about hosts and engines, the job that they make, and how it is handed over."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import weft
from weft.cli.followed import follow
from weft.cli.options import count
from weft.config import Settings
from weft.errors import LaunchError
from weft.launch.engines.described import FORMS
from weft.launch.engines.mpirun import HANDED_ON
from weft.launch.engines.plan import Plan
from weft.launch.engines.ssh import read_options
from weft.launch.environ import RANK_DEFAULTS
from weft.launch.job import Job
from weft.launch.journal.journal import Journal, Nowhere
from weft.launch.running import engine
from weft.launch.running.job import Host
from weft.launch.started import sky
from weft.untrusted import read_text, shown_text, translated, whole
from weft.watch.statement import FOLDER

IN_CONTAINERS = ("kubernetes", "skypilot")
"""Engines whose hosts have another Python, in other places."""
ENGINES_WITH_FOLDER = ("torchrun", "mpirun", "slurm")
"""Engines of others whose jobs write the folder of `--log-dir`."""
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that say where a script runs."""
    option = parser.add_argument_group("where it runs").add_argument
    option(
        "--ranks-per-host", "--nproc-per-node", "--nproc_per_node", dest="ranks_per_host", metavar="N", type=count,
        help="how many processes on each host",
    )  # fmt: skip
    option(
        "--engine",
        choices=tuple(FORMS),
        help="who starts the processes (default: local, that is weft on this machine)",
    )
    option("--form", help="the engine's form: openmpi4, openmpi5 or mpich; trainjob or jobset")
    option("--hosts", metavar="HOSTS", help="how many hosts, or their names: 4, or node1:4,node2:4")
    option("--hostfile", metavar="FILE", help="the names of the hosts, one a line: node1 slots=4")
    option("--time", metavar="SPAN", help="when the engine ends the job: 2h, 1h30m, or 02:00:00")
    option("--max-restarts", type=count, default=0, metavar="N", help="how often the engine starts it again")
    option(
        "--min-hosts", type=count, default=0, metavar="N",
        help="with how many hosts it is started again, for ssh (default: all)",
    )  # fmt: skip
    option("--gpus-per-host", type=count, default=0, metavar="N", help="GPUs, for engines that ask")
    option("--gpu-kind", metavar="KIND", help="what SkyPilot calls the GPUs, for example A100")
    option("--name", help="the job's name (default: the script's)")
    option("--image", help="the image of containers, for Kubernetes")
    option(
        "--mpi-options", metavar="OPTIONS", help='for mpirun, in one piece: --mpi-options="--bind-to core"'
    )
    option(
        "--ssh-options", metavar="OPTIONS",
        help='for ssh, in one piece: --ssh-options="-F config -p 2222" (default: WEFT_SSH_OPTIONS)',
    )  # fmt: skip
    option("--dry-run", action="store_true", help="print what would run where, and start nothing")


@dataclass(frozen=True)
class RankLayout:
    """Where ranks are: the hosts, or how many, and how many ranks each one has."""

    hosts: int | Sequence[str]
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """The number of ranks, on all hosts."""
        return self.ranks_per_host * (self.hosts if isinstance(self.hosts, int) else len(self.hosts))


def default(where: RankLayout) -> str:
    """Who starts a job if nobody is named: ssh on hosts with names, weft itself on this machine."""
    return "local" if isinstance(where.hosts, int) else "ssh"


def places(options: argparse.Namespace, default: int | None = None) -> RankLayout:
    """Where ranks are, by the options, or `default` ranks on each host where they say nothing.

    Raises:
        LaunchError: The options contradict each other, or hosts have different numbers of ranks.
    """
    hosts, slots = _hosts(options)
    number = hosts if isinstance(hosts, int) else len(hosts)
    ranks_by_option = {"--hosts": slots, "--ranks-per-host": options.ranks_per_host}
    for name, value in (
        ("--hosts", number),
        ("-n", options.ranks),
        ("--ranks-per-host", options.ranks_per_host),
    ):
        if value is not None and value < 1:
            raise LaunchError(f"{name} is {value}: it must be at least 1, for example {name} 2")
    if options.ranks is not None:
        if options.ranks % number:
            raise LaunchError(
                f"-n is {options.ranks}, which {number} hosts cannot share evenly: it counts all ranks"
            )
        ranks_by_option["-n"] = options.ranks // number
    given = {name: value for name, value in ranks_by_option.items() if value is not None}
    if len({*given.values()}) > 1:
        texts = [f"{value} by {name}" for name, value in given.items()]
        raise LaunchError(f"each host has {' and '.join(texts)}: leave all but one out")
    return RankLayout(hosts, next(iter(given.values()), default or 1))


def _hosts(options: argparse.Namespace) -> tuple[int | Sequence[str], int | None]:
    """The hosts, and how many ranks each one has if that is said with them."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("--hosts and --hostfile both name hosts: leave one out")
    if options.hostfile is not None:
        lines = (line.partition("#")[0].strip() for line in read_text(options.hostfile).splitlines())
        texts = [re.sub(r"\s+(slots=|:)", ":", line) for line in lines if line]
        return _named(texts, f"--hostfile {shown_text(options.hostfile)}")
    if options.hosts is None:
        return 1, None
    number = whole(options.hosts)
    return (number, None) if number is not None else _named(options.hosts.split(","), "--hosts")


def _named(texts: Sequence[str], origin: str) -> tuple[Sequence[str], int | None]:
    names, slots = [], set()
    for text in texts:
        name, colon, number = text.strip().partition(":")
        slot = whole(number) if colon else None
        if not name or (colon and not slot):
            raise LaunchError(
                f"{origin} has {shown_text(text)!r}: write a name, or a name and a number: node1:4"
            )
        names.append(name)
        slots.add(slot)
    if not names:
        raise LaunchError(f"{origin} names no host")
    if len(slots) > 1:
        raise LaunchError(f"{origin} gives hosts different numbers of ranks: give all the same")
    return names, slots.pop()


def span(text: str) -> timedelta:
    """The length of time that a text says.

    >>> str(span("1h30m")), str(span("02:00:00")), str(span("2d"))
    ('1:30:00', '2:00:00', '2 days, 0:00:00')
    """
    clock = re.fullmatch(r"([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])", text)
    if clock:
        hours, minutes, seconds = map(int, clock.groups())
        return timedelta(hours=hours, minutes=minutes, seconds=seconds)
    parts = re.findall(r"([0-9]{1,6})([dhms])", text)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != text:
        raise LaunchError(f"--time is {shown_text(text)!r}: write 2h, 1h30m or 02:00:00")
    found = timedelta(**{_UNITS[unit]: int(number) for number, unit in reversed(parts)})
    if found < timedelta(minutes=1):
        raise LaunchError(f"--time is {shown_text(text)!r}: give a minute at least, for example 2h")
    return found


def handed_over(options: argparse.Namespace) -> bool:
    """True if the job is described as a whole, for an engine or for reading.

    Weft's own launcher starts the others, and ``mpirun`` by itself, as it is given options.
    """
    if options.engine == "ssh" and not options.dry_run:
        return False
    asked = ["dry_run", "hosts", "hostfile", "form", "time", "gpus_per_host", "gpu_kind", "name"]
    asked += ["log_dir"] if options.engine == "mpirun" else []
    given = [name for name in asked if getattr(options, name)]
    restarts = options.max_restarts and options.engine != "local"
    return options.engine not in ("local", "mpirun") or bool(given or restarts)


def job_of(
    options: argparse.Namespace,
    where: RankLayout,
    variables: Mapping[str, str],
    mpi_options: Sequence[str],
) -> Job:
    """The job that the options describe, with its ranks' variables."""
    given = options.script[1:] if options.script[:1] == ["--"] else options.script
    here = options.engine not in IN_CONTAINERS
    handed = [name for name in HANDED_ON if here and name in os.environ and name not in variables]
    return Job(
        given[0] if given else "",
        given[1:],
        module=options.module,
        hosts=where.hosts,
        ranks_per_host=where.ranks_per_host,
        variables={**(RANK_DEFAULTS if options.engine != "local" else {}), **_by_text(variables)},
        hand_on=[] if options.engine == "local" else handed,
        engine=options.engine,
        form=options.form or (form_of_mpirun() if options.engine == "mpirun" else ""),
        name=options.name or "",
        time_limit=None if options.time is None else span(options.time),
        max_restarts=options.max_restarts,
        log_dir=options.log_dir or "",
        folder=os.getcwd(),
        python=sys.executable if here else "python",
        image=options.image or "",
        gpus_per_host=options.gpus_per_host,
        gpu_kind=options.gpu_kind or "",
        mpi_options=mpi_options,
        ssh_options=read_options(options.ssh_options, os.environ if options.engine == "ssh" else {}),
        min_hosts=options.min_hosts,
    )


class Hosts(NamedTuple):
    """Where ssh starts ranks, and their variables; nowhere for other engines."""

    there: Sequence[Host] = ()
    environ: Mapping[str, str] = {}


def hosts_of(options: argparse.Namespace, where: RankLayout, variables: Mapping[str, str]) -> Hosts:
    """The hosts of the engine ssh."""
    if options.engine != "ssh":
        return Hosts()
    job = job_of(options, where, variables, [])
    plan = job.plan()
    there = zip(job.host_names or ("localhost",), plan.commands, strict=False)
    return Hosts([Host(name, command.arguments) for name, command in there], plan.environ)


def journal_of(
    options: argparse.Namespace, where: RankLayout, variables: Mapping[str, str], settings: Settings
) -> Journal | Nowhere:
    """The journal of the job in the folder of `--log-dir`; one that writes nothing without that option."""
    if options.log_dir is None:
        return Nowhere()
    return journal_for(job_of(options, where, variables, []), settings)


def journal_for(job: Job, settings: Settings) -> Journal:
    """The same, for a job with a folder."""
    facts = {
        **job.plan().as_record(), "script": job.script, "ranks": job.ranks, "hosts": list(job.host_names),
        "max_restarts": job.max_restarts, "folder": os.getcwd(), "settings": asdict(settings),
        "weft": weft.__version__,
    }  # fmt: skip
    return Journal(Path(job.folder, job.log_dir), facts)


def _by_text(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with the text of a file of settings instead of its path: other hosts may not have it."""
    config = variables.get("WEFT_CONFIG", "").strip()
    if not config or config.startswith("{"):
        return dict(variables)
    return {**variables, "WEFT_CONFIG": read_text(config)}


def start(job: Job, journal: Callable[[], Journal]) -> int:
    """Hands the job over to its engine: this process becomes the engine's command, or follows the job.

    ``journal``: opens the journal of a job that has a folder; then the engine's command is a child of this process.

    Raises:
        LaunchError: The engine is not installed, or can only be planned.
    """
    if job.engine == "local":
        raise LaunchError("--hosts, --name and --form are for other engines: add --engine, or leave them out")
    if job.engine == "kubernetes":
        return follow(job)
    if job.engine == "ssh":
        raise LaunchError(f"the engine {job.engine} starts nothing yet: --dry-run prints what is to be run")
    if job.engine == "torchrun" and job.host_count > 1:
        raise LaunchError("torchrun starts the ranks of one host: --dry-run prints the command for each host")
    if job.engine == "ray" and find_spec("ray") is None:
        raise LaunchError(
            "Ray is not installed: pip install 'ray[train]'; --dry-run prints what is to be run"
        )
    plan = job.plan()
    (command,) = plan.commands
    path = shutil.which(command.arguments[0])
    if path is None and job.engine == "skypilot":
        print(plan)
        raise LaunchError(f"nothing was started, as there is no command sky: {sky.INSTALL}")
    if path is None:
        raise LaunchError(f"{command.arguments[0]} is not installed: --dry-run prints what is to be run")
    sys.stdout.flush()
    if job.log_dir and job.engine in ENGINES_WITH_FOLDER:
        with closing(journal()) as opened:
            return _hand_in(job, opened) if job.engine == "slurm" else _run(job, opened)
    _write(plan)
    os.execve(path, [*command.arguments], {**os.environ, **command.environ})


def _run(job: Job, journal: Journal) -> int:
    """The job's one command on this host, to its end."""
    logs = journal.begin(0, job.ranks, by_engine=True).absolute()
    variables = {**job.variables, FOLDER: str(logs)}
    (command,) = replace(job, log_dir=str(logs), variables=variables).plan().commands
    return engine.run(command.arguments, {**os.environ, **command.environ}, journal, logs, job.ranks)


def _hand_in(job: Job, journal: Journal) -> int:
    """To Slurm, whose batch script goes on with the journal."""
    plan = job.plan()
    (command,) = plan.commands
    _write(plan)
    environ = {**os.environ, **command.environ}
    done = subprocess.run(command.arguments, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        journal.note("ended", code=done.returncode)
    else:
        journal.note("handed in", job=done.stdout.strip().partition(";")[0])
    return done.returncode


def _write(plan: Plan) -> None:
    for file in plan.files:
        with translated(f'"{file.path}" cannot be written', LaunchError):
            Path(file.path).parent.mkdir(parents=True, exist_ok=True)
            Path(file.path).write_text(file.text, encoding="utf-8")


def form_of_mpirun() -> str:
    """The form of the installed mpirun; the first form where that is not to be seen.

    >>> form_of_mpirun() in FORMS["mpirun"]
    True
    """
    try:
        done = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return FORMS["mpirun"][0]
    found = re.search(r"\(Open MPI\) ([0-9]+)", done.stdout)
    if found:
        return "openmpi4" if int(found[1]) < 5 else "openmpi5"
    return "mpich" if "HYDRA" in done.stdout else FORMS["mpirun"][0]
