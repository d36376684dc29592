"""`weft report`: why a recorded run is as slow as it is, as text, as a page or as JSON."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.analysis.analysis import Analysis
from weft.analysis.compare import compare
from weft.analysis.plan.comparison import BesidePlan, beside_answer, beside_plan
from weft.analysis.scaling import scale
from weft.cli.draw import write, wrote
from weft.cli.live import PAGE
from weft.cli.options import count
from weft.errors import UsageError
from weft.profiler.foreign_traces import is_traces, read_traces
from weft.profiler.reading import read_run
from weft.report.run.document import run_json
from weft.report.run.page import run_page
from weft.report.run.report import Report
from weft.report.run.text import run_text
from weft.rules.configure import failing, load_rule, rules, wanted
from weft.rules.rule import Finding, Rule, Status, judge
from weft.rules.verdict import verdict
from weft.terminal_text import visible
from weft.untrusted import LARGEST, read_file

FAILED = 3
"""The exit code where a finding is there that `--fail-on` names."""
_UNJUDGED = (Status.NOT_ENOUGH_DATA, Status.ERROR)
_EXAMPLES = """\
examples:
  weft report out                                    # the verdict, the findings, where the time went
  weft report out --html                             # the same and more as a page, out/report.html
  weft report out --against earlier                  # what became faster or slower, and why
  weft report --scaling out1 out2 out4               # runs on different numbers of ranks, side by side
  weft report out --fail-on critical                 # for CI: exit code 3 if a finding is critical
  weft report out --set PipelineBubble_warn=0.1 --rules my_rules:ManySteps
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="say why a recorded run is as slow as it is",
        description="Reads the folder of a recorded run and says what makes it slow, with what evidence, and what "
        "to change: as text, as a page (.html) or as JSON.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", help="what weft run --report or --record wrote, or traces of torch.profiler"
    )
    parser.add_argument(
        "--html", nargs="?", const="", metavar="FILE", help=f"write a page (default: {PAGE} in the folder)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON; docs/report.md has its form"
    )
    parser.add_argument("--against", metavar="EARLIER", help="the folder of an earlier run to compare with")
    parser.add_argument(
        "--scaling",
        nargs="+",
        metavar="FOLDER",
        help="runs on different numbers of ranks; the last one is shown",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="what weft plan --json wrote, to compare with instead of the job's own plan",
    )
    parser.add_argument(
        "--step", type=partial(count, most=LARGEST), metavar="N", help="the step at which the timeline opens"
    )
    parser.add_argument(
        "--rules", action="append", default=[], metavar="MODULE:CLASS", help="ask a rule of your own as well"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="RULE_PARAMETER=VALUE",
        help="change a parameter of a rule",
    )
    parser.add_argument(
        "--fail-on", action="append", default=[], metavar="RULE|warning|critical",
        help=f"end with exit code {FAILED} if this rule, or any, finds a fault",
    )  # fmt: skip
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    if options.rules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m weft` has it
    asked = rules(options.set, map(load_rule, options.rules))
    names = wanted(options.fail_on, asked)
    folder, report = _report(options, asked)
    if options.html is not None:
        out = Path(options.html) if options.html else folder / PAGE
        print(
            wrote(out, run_page(report), report.analysis.timeline), file=sys.stderr if options.json else None
        )
    if options.json:
        print(run_json(report))
    elif options.html is None:
        print(run_text(report))
    else:
        print(f"{report.verdict.status.value}: {report.verdict.text}")
    code = exit_code("report", names, report.findings, report.analysis.run.complete)
    return FAILED if report.analysis.run.failed is not None else code


def exit_code(command: str, names: Sequence[str], findings: Sequence[Finding], complete: bool) -> int:
    """The exit code that `--fail-on` gives a run; prints why, and what could not be judged.

    Args:
        command: Which one asks.
        names: What `--fail-on` names.
        findings: What the rules say.
        complete: Whether the run has come to its end.
    """
    failed = failing(findings, names)
    named = [*failed, *(each for each in findings if each.rule in names and each.status in _UNJUDGED)]
    lines = [f"{each.rule} ({each.status.value}): {visible(each.text)}" for each in named]
    if names and not complete:
        lines.append("the run has not come to its end, so only its beginning is judged")
    for line in lines:
        print(f"weft {command}: --fail-on: {line}", file=sys.stderr)
    return FAILED if failed else 0


def write_page(folder: Path) -> Path:
    """Writes the page of a run into its folder, whole or not at all, also while the run goes on; gives its path."""
    out = folder / PAGE
    write(out, run_page(_judged(_read(folder), rules())))
    return out


def _report(options: argparse.Namespace, asked: Sequence[Rule]) -> tuple[Path, Report]:
    """The run to show, and its folder."""
    folders = [Path(name) for name in options.scaling or []]
    if options.folder is None and not folders:
        raise UsageError(
            "no folder is given: write for example weft report out, after weft run --report out train.py"
        )
    if len(folders) == 1 and options.folder is None:
        raise UsageError("--scaling compares runs: give two folders or more")
    folder = Path(options.folder) if options.folder is not None else folders[-1]
    analysis = _read(folder)
    others = {name: _read(name) for name in folders if name != folder}
    steps = analysis.timeline.steps
    if options.step is not None and options.step not in steps:
        near = min(steps, key=lambda step: abs(step - options.step), default=None)
        hint = (
            "no step was"
            if near is None
            else f"the nearest that was is {near}, of {len(steps)} steps with spans"
        )
        raise UsageError(f"step {options.step} was not recorded: {hint}")
    compared = compare(_read(Path(options.against)), analysis) if options.against is not None else None
    scaled = scale([others.get(name, analysis) for name in folders]) if folders else None
    report = _judged(analysis, asked)
    plan = report.plan if options.plan is None else _beside_file(analysis, options.plan)
    return folder, Report(analysis, report.verdict, asked, compared, scaled, plan, options.step)


def _beside_file(analysis: Analysis, name: str) -> BesidePlan:
    return read_file(Path(name), lambda text: beside_answer(analysis, text, Path(name).name))


def _read(folder: Path) -> Analysis:
    """A recording of weft, or traces of torch.profiler."""
    return Analysis(read_traces(folder) if is_traces(folder) else read_run(folder))


def _judged(analysis: Analysis, asked: Sequence[Rule]) -> Report:
    return Report(analysis, verdict(judge(asked, analysis), asked), asked, plan=beside_plan(analysis))
