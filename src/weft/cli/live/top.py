"""`weft top`: a running job, one line a rank, from the recording that it writes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.analysis.messages import waits
from weft.analysis.run import Run, Step
from weft.errors import UsageError
from weft.launch.journal.job_status import now_s
from weft.profiler.live.following import Follower, Judged
from weft.report.text import table
from weft.rules.rule import Finding, Status
from weft.terminal_text import visible
from weft.timeline import Timeline
from weft.units import format_bytes, format_seconds
from weft.untrusted import shown_path
from weft.watch.files.blocked_ranks import NOTHING, Standing

LAST = 20
"""A line is about so many of the last steps."""
COLUMNS = ("rank", "step", "step time", "rate", "idle", "waits for", "memory", "finding")
_EXAMPLES = """\
examples:
  weft run -n 4 --report out train.py &
  weft top out
  weft top out --once
"""


class Row(NamedTuple):
    """The table's row of a rank, as text."""

    rank: str
    step: str
    step_time: str
    rate: str
    idle: str
    waits_for: str
    memory: str
    finding: str


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running job, one line a rank",
        description="Shows what the ranks of a job do while it runs, as the mean of their last steps. Ends with the "
        "job, or with Ctrl-C.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="what weft run --report, or --record, writes")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument(
        "--every", type=_seconds, default=1.0, metavar="SECONDS", help="between two tables (default: 1)"
    )
    parser.set_defaults(handler=main)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError("write seconds from 0.05 to 3600")
    return value


def main(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{shown_path(folder)} is a file: name the folder that weft run --report writes")
    follower, judged = Follower(folder), Judged()
    if options.once:
        run = follower.look()
        if not run.ranks:
            raise UsageError(
                f"{shown_path(folder)} holds no recording: name the folder that weft run --report writes"
            )
        findings = judged.of(run)
        print(_text(rows(run, findings, Standing.read(folder)), findings))
        return 0
    if not folder.exists():
        print(f"weft top: {shown_path(folder)} is not there yet: waiting for a job", file=sys.stderr)
    with suppress(KeyboardInterrupt):
        rich = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        (_on_terminal if rich else _in_lines)(folder, follower, judged, options.every)
    return 0


def rows(run: Run, findings: Sequence[Finding] = (), standing: Standing = NOTHING) -> list[Row]:
    """A line for each rank, of its last steps. ``standing``: the ranks that stand in an operation on a file now."""
    ranks = sorted({*run.ranks, *standing.operations, *standing.waiting})
    lines = [_row(run, rank, findings) for rank in ranks]
    if run.complete:
        return lines
    now = now_s()
    blocked = {rank: standing.of(rank, now).removeprefix("waits for ") for rank in ranks}
    return [
        line._replace(waits_for=blocked[rank] or line.waits_for)
        for rank, line in zip(ranks, lines, strict=True)
    ]


def _row(run: Run, rank: int, findings: Sequence[Finding]) -> Row:
    steps = run.steps.get(rank, ())[-LAST - 1 :]
    if not steps:
        return Row(str(rank), "-", "", "", "", "", "", "")
    counted, seconds = _periods(steps)
    most, waited_s = _waited(run.timeline, rank, {step.step for step in counted})
    facts = run.facts.get(rank)
    limit = facts.limit_bytes if facts is not None else 0
    memory = steps[-1].memory_bytes
    return Row(
        str(rank),
        str(steps[-1].step) + (" (evaluates)" if steps[-1].evaluates else ""),
        format_seconds(seconds / len(counted)),
        _rate(counted, seconds),
        f"{max(0.0, 1 - sum(step.work_s for step in counted) / seconds):.0%}" if seconds else "",
        f"rank {most}, {min(1.0, waited_s / seconds):.0%}" if most >= 0 and seconds else "",
        (format_bytes(memory) + (f" of {format_bytes(limit)}" if limit else "")) if memory else "",
        next((each.rule for each in findings if not each.ranks or rank in each.ranks), ""),
    )


def _waited(timeline: Timeline, rank: int, steps: Set[int]) -> tuple[int, float]:
    """The rank that this one waited for most in these steps, and how long; -1 if it waited for none."""
    own = timeline.of_rank(rank) if rank in timeline.ranks else ()
    found = waits(Timeline(span for span in own if span.step in steps))
    (_, other), seconds = max(found.items(), key=lambda each: each[1], default=((rank, -1), 0.0))
    return other, seconds


def _periods(steps: Sequence[Step]) -> tuple[Sequence[Step], float]:
    """The steps to count, and how long they took with what lies between; the last one counts only where it is alone."""
    if len(steps) > 1 and steps[-1].start_s > steps[0].start_s:
        return steps[:-1], steps[-1].start_s - steps[0].start_s
    return steps[-1:], steps[-1].step_s


def _rate(steps: Sequence[Step], seconds: float) -> str:
    """Tokens a second if the script logs them (`weft.log({"tokens": ...})`), else samples."""
    tokens = sum(step.values.get("tokens", 0.0) for step in steps)
    samples = sum(step.samples for step in steps)
    if not seconds or not (tokens or samples):
        return ""
    return f"{tokens / seconds:,.0f} tokens/s" if tokens else f"{samples / seconds:,.0f} samples/s"


def plain(rows: Sequence[Row]) -> str:
    """The table as text, without the columns that are empty."""
    shown = [number for number in range(len(COLUMNS)) if number == 0 or any(row[number] for row in rows)]
    return table([COLUMNS[number] for number in shown], [[row[number] for number in shown] for row in rows])


def worst(findings: Sequence[Finding]) -> str:
    """The line below the table: the worst finding in words."""
    if not findings:
        return ""
    return visible(f"{findings[0].rule} ({findings[0].status.value}): {findings[0].text}")


def _text(shown: Sequence[Row], findings: Sequence[Finding]) -> str:
    return "\n".join(filter(None, [plain(shown), worst(findings)]))


def _in_lines(folder: Path, follower: Follower, judged: Judged, every_s: float) -> None:
    """A table whenever a step has ended, or a rank stands in an operation on a file."""
    before: object = ([], NOTHING)
    while True:
        run, standing = follower.look(), Standing.read(folder)
        findings = judged.of(run)
        shown = rows(run, findings, standing)
        now = ([row.step for row in shown], standing)
        if now != before:
            print(_text(shown, findings), end="\n\n", flush=True)
            before = now
        if run.complete and run.ranks:
            print("the run is complete", flush=True)
            return
        time.sleep(every_s)


def _on_terminal(folder: Path, follower: Follower, judged: Judged, every_s: float) -> None:
    """One table that changes; the last one stays."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            run = follower.look()
            live.update(_drawn(run, judged.of(run), Standing.read(folder)), refresh=True)
            if run.complete and run.ranks:
                return
            time.sleep(every_s)


def _drawn(run: Run, findings: Sequence[Finding], standing: Standing = NOTHING) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not run.ranks:
        return Text("waiting for the first step ...")
    drawn = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for row in rows(run, findings, standing):
        drawn.add_row(*(Text(visible(cell)) for cell in row))
    style = "red" if findings and findings[0].status is Status.CRITICAL else "yellow"
    cause = [Text(worst(findings), style)] if findings else []
    return Group(drawn, *cause, *([Text("the run is complete")] if run.complete else []))
