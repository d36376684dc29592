"""`weft verify`: a script's first steps, compared with one process under every schedule."""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from weft.cli import run
from weft.config import PIPELINES, Settings
from weft.errors import ConfigError, LaunchError, ScheduleError, UsageError
from weft.report.text import table
from weft.schedule.table import KINDS, named

_EXAMPLES = """\
examples:
  weft verify -n 2 train.py --lr 0.001
  weft verify -n 4 --config job.json train.py
  weft verify -n 2 --schedules 1f1b,zb_h1 train.py

the exit code is 1 if something differs, or if a job fails
"""


class Row(NamedTuple):
    """A line of the table."""

    schedule: str
    step: str
    losses: str
    gradients: str
    verdict: str


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare a script's first steps with one process, under every schedule",
        description="Starts a script once for each schedule that its settings allow, ends it after three steps, and "
        "compares these with one process: losses, gradients, buffers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="weft verify [-h] [-n RANKS] [options] [-m] script ...",
    )
    parser.add_argument(
        "--schedules", metavar="NAMES", help="some only, with commas between them (default: all of them)"
    )
    run.add_options(parser)
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    if options.engine not in (None, "local") or options.dry_run:
        raise LaunchError("weft verify starts its jobs on this machine: leave out --engine and --dry-run")
    names = [named(name) for name in options.schedules.split(",")] if options.schedules else list(PIPELINES)
    unknown = [name for name in names if name not in PIPELINES]
    if unknown:
        raise ConfigError(f"--schedules names {', '.join(unknown)}: the schedules are {', '.join(PIPELINES)}")
    rows: list[Row] = []
    settings: Settings | None = None
    framework = ""
    good = True
    for name in names:
        against = "" if options.schedules else refusal(name, settings, framework)
        if against:
            rows.append(Row(name, "", "", "", f"left out: {against}"))
            continue
        code, steps = run_and_compare(options, name)
        settings = settings or next((Settings(**one["settings"]) for one in steps), None)
        framework = framework or next((str(one.get("framework", "")) for one in steps), "")
        good = good and not code and bool(steps) and not any(one.get("fault") for one in steps)
        rows += [row(name, one) for one in steps]
        if code or not steps:
            why = f"the job failed with exit code {code}" if code else "no step of a split model ran"
            rows.append(Row(name, "", "", "", why))
    print(table(Row._fields, rows), flush=True)
    return 0 if good else 1


def run_and_compare(options: argparse.Namespace, name: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of a job with that schedule, and its report of each step."""
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        path = Path(folder) / "report"
        job = copy.copy(options)
        job.set = [*options.set, f"pipeline={name}", "verify=gradients", f"verify_report={path}"]
        code = run.main(job)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return code, [json.loads(line) for line in lines]


def refusal(name: str, settings: Settings | None, framework: str = "") -> str:
    """Why the settings do not allow a schedule, as far as that is known before a job has run.

    ``framework``: that of the script, where a job has reported it.
    """
    if framework == "tensorflow" and KINDS[name].splits:
        return "TensorFlow takes gradients as a whole, and it splits backward passes in two"
    if name == "file" and (settings is None or not settings.schedule_file):
        return "schedule_file names none"
    if settings is None or settings.microbatches == "auto" or name in ("file", "auto", "list"):
        return ""
    from weft.plan.chosen import schedule_for

    try:
        schedule_for(replace(settings, pipeline=name), None, settings.microbatch_count)
    except (ConfigError, ScheduleError, UsageError) as error:
        return str(error)
    return ""


def row(name: str, step: dict[str, Any]) -> Row:
    """One step as a line of the table."""
    if "reason" in step:
        return Row(name, str(step["step"] + 1), "", "", f"not compared: {step['reason']}")
    gradients = "" if step["gradients"] is None else f"{step['gradients']:.1e}"
    return Row(name, str(step["step"]), f"{step['losses']:.1e}", gradients, step["fault"] or "equal")
