"""`weft run`: a script on several processes, of this machine or of several hosts."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from weft import config
from weft.analysis.analysis import Analysis
from weft.cli import engines
from weft.cli.live.fresh_page import fresh_page, not_here, nothing_recorded, recording_files
from weft.cli.options import count
from weft.cli.report import FAILED, exit_code
from weft.compat import distribution, launch_environ
from weft.compat.modelparallel.container import container_environ, folders
from weft.compat.variables import ALLOW_PICKLE
from weft.errors import LaunchError
from weft.launch.discovery import TOKEN
from weft.launch.engines import mpirun
from weft.launch.environ import RANK_DEFAULTS
from weft.launch.rank import FILE, MODULE
from weft.launch.running import restarts
from weft.launch.running.job import Job
from weft.profiler import detail
from weft.profiler.live.metrics import Collector, Endpoint
from weft.profiler.reading import read_run
from weft.reduce import members
from weft.rules.configure import wanted
from weft.rules.rule import judge
from weft.rules.table import RULES
from weft.rules.verdict import verdict
from weft.untrusted import shown_path, shown_text, translated
from weft.watch import progress
from weft.watch.heartbeat import Page
from weft.watch.monitor import Limits

_EXAMPLES = """\
examples:
  weft run -n 2 train.py --lr 0.001
  weft run -n 4 --config job.json --set microbatches=8 train.py
  weft run -n 2 -m package.train
  weft run -n 2 --record recording train.py
  weft run -n 2 --report out train.py
  weft run -n 2 --device cpu --smdistributed train_gpt.py
  weft run --hosts node1:4,node2:4 --max-restarts 5 --log-dir runs/a train.py
  weft run -n 4 --engine mpirun --mpi-options "-H node1:2,node2:2" train.py
  weft run --engine slurm --hosts 4 --ranks-per-host 2 --time 2h --dry-run train.py
"""


Attend = Callable[[Page], None]
OWN = ("local", "ssh")
"""The engines that are weft's own launcher."""
REPLICA_RESTARTS = 10
"""Restarts of replicas, in all, where --max-restarts does not say."""
_FOLDERS = ("record", "log_dir", "tensorboard")
"""Settings that are folders, which the command line has options for."""
_OPTIONS = {"WEFT_CONFIG": "--config", "WEFT_SET": "--set"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="start a script on several processes",
        description="Starts a script on several processes and ends them all if one fails.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="weft run [-h] [-n RANKS] [options] [-m] script ...",
    )
    add_options(parser)
    parser.set_defaults(handler=main)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that start a script."""
    _add_job(parser)
    engines.add_options(parser)
    _add_watching(parser)
    _add_original(parser)
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


class _Setting(argparse.Action):
    """`--microbatches 4` is `--set microbatches=4`."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        namespace.set = [*namespace.set, f"{self.const}={value}"]


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Options for the number of ranks, and for their settings."""
    parser.add_argument(
        "-n", "-np", "--ranks", "--np",
        dest="ranks", metavar="N", type=count, help="how many processes, on all hosts (default: 1)",
    )  # fmt: skip
    add_settings(parser)
    for name, meaning in (("heartbeat", "a rank counts as frozen"), ("wait", "a waiting job is ended")):
        parser.add_argument(
            f"--timeout-{name}", type=float, metavar="SECONDS", help=f"after how many seconds {meaning}"
        )
    parser.add_argument(
        "-x", dest="variables", action="append", default=[], metavar="NAME[=VALUE]",
        help="a variable for the ranks, on all hosts",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("cpu", "cuda"),
        help="cpu: hide the GPUs; with --smdistributed, calls for CUDA mean the CPU then (default: GPUs if there are)",
    )  # fmt: skip


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Options for the settings of a job."""
    parser.add_argument("--config", metavar="JSON", help="settings: JSON text, or the path of a JSON file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="one setting; wins over all others. Each is an option, too: --microbatches 4",
    )  # fmt: skip
    for setting in (row.name for row in config.describe() if row.name not in _FOLDERS):
        parser.add_argument(
            *dict.fromkeys((f"--{setting.replace('_', '-')}", f"--{setting}")),
            dest="set", action=_Setting, const=setting, help=argparse.SUPPRESS,
        )  # fmt: skip


def _add_watching(parser: argparse.ArgumentParser) -> None:
    """Options for what the job shows and records."""
    group = parser.add_argument_group("what it shows and records")
    group.add_argument(
        "--prefix", choices=("all", "others", "none"),
        help="whose lines start with [rank n] (default: others, than rank 0)",
    )  # fmt: skip
    group.add_argument("--quiet", action="store_true", help="no line of progress while steps run in a loop")
    for name, meaning in (
        ("record", "each rank records there what it runs when; weft draw shows it"),
        ("report", "records there all that says where time goes, and keeps FOLDER/report.html up to date"),
        (
            "log-dir",
            "logs of all ranks, events and weft.log's values; see weft status, weft logs and weft stop",
        ),
        ("tensorboard", "where values of the script go for TensorBoard (default: --log-dir)"),
    ):
        group.add_argument(f"--{name}", metavar="FOLDER", help=meaning)
    group.add_argument(
        "--metrics-port", metavar="PORT", type=partial(count, most=65535),
        help="answer Prometheus at this port of the loopback while the job runs (0: at any free one)",
    )  # fmt: skip
    group.add_argument(
        "--fail-on", action="append", default=[], metavar="RULE",
        help=f"end with exit code {FAILED} if the rule warns of something in the recording (any: any rule)",
    )  # fmt: skip


def _add_original(parser: argparse.ArgumentParser) -> None:
    """Options for scripts and descriptions written for smdistributed."""
    group = parser.add_argument_group("scripts written for smdistributed")
    group.add_argument(
        "--distribution", metavar="JSON",
        help="the original's distribution: JSON text, or the path of a JSON file; see docs/migration.md",
    )  # fmt: skip
    group.add_argument(
        "--smdistributed", action="store_true", help="they run unchanged; see docs/migration.md"
    )
    group.add_argument(
        "--allow-pickle", action="store_true",
        help="with --smdistributed, pickled objects of checkpoints are read, which can run any code",
    )  # fmt: skip


def main(options: argparse.Namespace) -> int:
    parsed = distribution.read(options.distribution) if options.distribution else distribution.Distribution()
    where = engines.places(options, parsed.processes_per_host)
    options.engine = options.engine or (parsed.engine if where.hosts != 1 else "") or engines.default(where)
    options.ranks = where.ranks
    variables = {**parsed.hand_over(os.environ), **_variables(options.variables)}
    given = _settings(options, parsed)
    environ = {**os.environ, **variables, **given}
    origins = {**_OPTIONS, **({"WEFT_CONFIG": "--distribution"} if parsed.parameters else {})}
    settings = config.resolve(
        None, environ, options.ranks, {name: origins[name] for name in given if name in origins}
    )
    added = _compatible(options, environ, settings)
    environ |= added
    if options.fail_on:
        _check_rules(options, settings)
    if options.metrics_port is not None:
        _needs_launcher(options, "--metrics-port", OWN)
    if options.mpi_options is not None and options.engine != "mpirun":
        raise LaunchError("--mpi-options is for mpirun: add --engine mpirun, or leave it out")
    if options.ssh_options is not None and options.engine != "ssh":
        raise LaunchError("--ssh-options is for ssh: name the hosts with --hosts, or leave it out")
    if options.min_hosts and options.engine != "ssh":
        raise LaunchError("--min-hosts is for ssh: name the hosts with --hosts, or leave it out")
    _warn_of_page(options)
    if settings.min_replicas:
        _check_replicas(options, settings)
    if engines.handed_over(options):
        return _hand_over(options, where, {**variables, **given, **added}, parsed, settings)
    if options.engine == "mpirun":
        return _by_mpirun(options, environ, [*variables, *added], parsed.mpi_options)
    limits = Limits(settings.heartbeat_timeout, settings.wait_timeout)
    command, hosts = _command(options), engines.hosts_of(options, where, {**variables, **given, **added})
    environ = dict(hosts.environ) if hosts.there else environ
    container = {}
    if options.smdistributed and not hosts.there:
        container = container_environ(environ, options.ranks, options.script[1:])
        environ |= container
    fresh = fresh_page(Path(options.report)) if options.report else nullcontext()
    before = recording_files(Path(settings.record)) if settings.record else {}
    with (
        folders(container), fresh, _metrics(options, settings) as attend,
        closing(engines.journal_of(options, where, {**variables, **given, **added}, settings)) as journal,
    ):  # fmt: skip
        job = Job(
            command, options.ranks, environ, options.prefix or "others", limits, attend,
            restarts=options.max_restarts, journal=journal, hosts=hosts.there, least_hosts=options.min_hosts,
            recording=settings.record, **_replicas(options, settings),
        )  # fmt: skip
        code = restarts.run(job)
    least = options.min_hosts * where.ranks_per_host or options.ranks
    lacking = not_here(Path(settings.record), before, least) if hosts.there and settings.record else ""
    if lacking and options.report:
        print(f"weft run: the page has some ranks only: {lacking}", file=sys.stderr)
    return code or _judge(options, Path(settings.record), before, lacking)


def _check_replicas(options: argparse.Namespace, settings: config.Settings) -> None:
    """Refuse what does not go with replicas that may be lost.

    Raises:
        LaunchError: Ranks are elsewhere, the host cannot keep replicas apart, or fewer may be left than there are.
    """
    least, count = settings.min_replicas, options.ranks // settings.partitions
    _needs_launcher(options, "min_replicas")
    asked = {
        "--log-dir": options.log_dir, "--fail-on": options.fail_on, "--metrics-port": options.metrics_port is not None,
        "--smdistributed": options.smdistributed, "--dry-run": options.dry_run, "--hosts": options.hosts,
    }  # fmt: skip
    if given := [name for name, value in asked.items() if value]:
        raise LaunchError(f"min_replicas does not go with {' and '.join(given)}: leave one of them out")
    if not members.available():
        raise LaunchError("min_replicas needs Linux on x86-64, where replicas share memory: leave it out")
    if not least < count:
        raise LaunchError(
            f"min_replicas is {least}, and {options.ranks} ranks make {count} replica{'s' * (count > 1)}: write a "
            "smaller number, or start more ranks"
        )


def _replicas(options: argparse.Namespace, settings: config.Settings) -> dict[str, int]:
    """The job's replicas, if some may be lost."""
    if not settings.min_replicas:
        return {}
    return {
        "replica_ranks": settings.partitions, "least_replicas": settings.min_replicas,
        "replica_restarts": options.max_restarts or REPLICA_RESTARTS,
    }  # fmt: skip


def _hand_over(
    options: argparse.Namespace,
    where: engines.RankLayout,
    variables: Mapping[str, str],
    parsed: distribution.Distribution,
    settings: config.Settings,
) -> int:
    """Another engine starts the job, or nobody: with `--dry-run` the plan is printed."""
    if options.prefix is not None and options.engine != "local":
        _needs_launcher(options, "--prefix")
    if options.engine not in engines.IN_CONTAINERS:
        _command(options)
    elif options.smdistributed:
        raise LaunchError(
            f"--smdistributed is not for {options.engine}: start the image's script with weft-python"
        )
    more = [*parsed.mpi_options, *mpirun.options_of(options.mpi_options or "")]
    job = engines.job_of(options, where, variables, more)
    if not options.dry_run:
        return engines.start(job, partial(engines.journal_for, job, settings))
    print(job.plan())
    return 0


def _needs_launcher(options: argparse.Namespace, name: str, known: Sequence[str] = ("local",)) -> None:
    if options.engine not in known:
        where = "on this machine or by ssh" if "ssh" in known else "on this machine"
        raise LaunchError(f"{name} is for ranks {where}, and not for {options.engine}: leave it out")


def _warn_of_page(options: argparse.Namespace) -> None:
    """Says that nobody keeps the page of a job up to date where weft's launcher does not."""
    if options.report and options.engine not in OWN:
        print(
            "weft run: the page is kept up to date only for ranks on this machine or by ssh: write it by "
            f"weft report {shown_path(options.report)} --html",
            file=sys.stderr,
        )


def _check_rules(options: argparse.Namespace, settings: config.Settings) -> None:
    _needs_launcher(options, "--fail-on", OWN)
    if not settings.record:
        raise LaunchError(
            "--fail-on judges what the job records, and it records nothing: add --record FOLDER"
        )
    wanted(options.fail_on, RULES)


def _judge(options: argparse.Namespace, folder: Path, before: Mapping[str, int], lacking: str) -> int:
    """The exit code that the recording of a job deserves which ended well; `before` are the files of an earlier one,
    `lacking` says which of this one are elsewhere."""
    if not options.fail_on:
        return 0
    if recording_files(folder) == before:
        raise LaunchError(f"--fail-on judges what the job records; {nothing_recorded(folder)}")
    if lacking:
        raise LaunchError(f"--fail-on judges what all ranks record: {lacking}")
    recorded = read_run(folder)
    findings = verdict(judge(RULES, Analysis(recorded)), RULES).findings
    return exit_code("run", wanted(options.fail_on, RULES), findings, recorded.complete)


@contextmanager
def _metrics(options: argparse.Namespace, settings: config.Settings) -> Iterator[Attend | None]:
    """Who answers Prometheus while the job runs, if that is asked for."""
    if options.metrics_port is None:
        yield None
        return
    endpoint = Endpoint(options.metrics_port)
    recording = Path(settings.record) if settings.record else None

    def attend(page: Page) -> None:
        endpoint.start(Collector(page.signs, recording, Path(settings.log_dir)))

    try:
        print(f"weft run: metrics are at {endpoint.address}", file=sys.stderr, flush=True)
        yield attend
    finally:
        endpoint.close()


def _compatible(
    options: argparse.Namespace, environ: Mapping[str, str], settings: config.Settings
) -> dict[str, str]:
    """The variables behind `--device` and `--smdistributed`."""
    added = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    added |= _progress(options)
    if options.smdistributed:
        added |= launch_environ(
            environ, options.script, usual_partitions(settings, options.ranks), options.device
        )
        added |= {ALLOW_PICKLE: "1"} if options.allow_pickle else {}
    return added


def usual_partitions(settings: config.Settings, ranks: int) -> int:
    """The partitions of a job whose script does not say: all ranks, less those that share weights or sequences."""
    shares = settings.sharded_data_parallel_degree > 1
    left = 1 if shares else max(1, ranks // settings.tp_size)
    return settings.partitions if settings.partitions > 1 else left


def _progress(options: argparse.Namespace) -> dict[str, str]:
    """The variables that say how rank 0 shows progress."""
    if options.quiet:
        return {progress.VARIABLE: "off"}
    if options.engine not in ("local", "ssh") or not sys.stderr.isatty():
        return {progress.VARIABLE: "plain"}
    return {progress.VARIABLE: "terminal", "COLUMNS": str(shutil.get_terminal_size().columns)}


def _by_mpirun(
    options: argparse.Namespace, environ: Mapping[str, str], exported: Sequence[str], more: Sequence[str]
) -> int:
    """This process becomes mpirun, so that signals and exit codes are its own."""
    if options.prefix is not None:
        raise LaunchError('--prefix is not for mpirun: use --mpi-options="--tag-output"')
    environ = {**RANK_DEFAULTS, TOKEN: secrets.token_hex(16), **environ}
    given = " ".join(filter(None, [shlex.join(more), options.mpi_options]))
    command = mpirun.command(_command(options), options.ranks, environ, exported, given)
    path = shutil.which("mpirun", path=environ.get("PATH"))
    if path is None:
        raise LaunchError(
            "mpirun is not installed: install Open MPI (Debian: openmpi-bin) or leave out --engine"
        )
    sys.stdout.flush()
    os.execve(path, command, environ)


def _variables(texts: Sequence[str]) -> dict[str, str]:
    """The variables of `-x`; a name alone stands for the value it has."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in os.environ):
            raise LaunchError(
                f"-x {shown_text(text)}: there is no such variable, give it a value with "
                f"-x {shown_text(name) or 'NAME'}=VALUE"
            )
        found[name] = value if equals else os.environ[name]
    return found


def _settings(options: argparse.Namespace, parsed: distribution.Distribution) -> dict[str, str]:
    """The variables that hand the settings to the ranks."""
    if options.config and parsed.parameters:
        raise LaunchError("--config and the parameters of --distribution are both settings: leave one out")
    values = config.parse_assignments(options.set)
    for name, value in (
        ("heartbeat_timeout", options.timeout_heartbeat),
        ("wait_timeout", options.timeout_wait),
    ):
        if value is not None:
            values[name] = value
    for name in _FOLDERS:
        if getattr(options, name) is not None:
            values[name] = _folder(options, name)
    if options.report is not None:
        if options.record is not None:
            raise LaunchError("--report records, too: leave --record out")
        values["record"] = _folder(options, "report")
        if "record_steps" not in config.written(
            os.environ | ({"WEFT_CONFIG": options.config} if options.config else {})
        ):
            values.setdefault("record_steps", detail.REPORT)
    environ = {}
    if options.config:
        environ["WEFT_CONFIG"] = options.config
    environ |= parsed.settings()
    if values:
        environ["WEFT_SET"] = json.dumps(config.with_those_of(os.environ, values))
    return environ


def _folder(options: argparse.Namespace, name: str) -> str:
    """The folder that an option names, for ranks that may run elsewhere."""
    path = getattr(options, name)
    if os.path.exists(path) and not os.path.isdir(path):
        raise LaunchError(f"--{name.replace('_', '-')} {shown_path(path)}: this is a file, name a folder")
    return os.path.abspath(path)


def _command(options: argparse.Namespace) -> list[str]:
    return [sys.executable, FILE, *script_and_arguments(options)]


def script_and_arguments(options: argparse.Namespace) -> list[str]:
    """The arguments of whoever runs the script.

    Raises:
        LaunchError: No script is given, or there is no such file.
    """
    given = options.script[1:] if options.script[:1] == ["--"] else options.script
    script, *arguments = given or [""]
    if not script:
        raise LaunchError(f"no script is given: weft {options.command} -n 2 train.py")
    if options.module:
        return [MODULE, script, *arguments]
    with translated(f'"{shown_path(script)}" is no script', LaunchError):
        if not Path(script).is_file():
            raise LaunchError(
                f'there is no file "{shown_path(script)}": give a script, or -m and the name of a module'
            )
    return [script, *arguments]
