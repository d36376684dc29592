"""`weft draw`: a timeline as a page, a picture, or a trace for other viewers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weft.cli.options import count
from weft.errors import UsageError
from weft.profiler.reading import read_recording
from weft.report.chrome import chrome_trace, rank_traces
from weft.report.page import Entry, page
from weft.report.picture import timeline_png, timeline_svg
from weft.timeline import Timeline
from weft.units import format_bytes
from weft.untrusted import LARGEST, read_file, shown_path, translated

_EXAMPLES = """\
examples:
  weft draw recording --out timeline.html
  weft draw recording --step 5 --out step.svg
  weft draw recording --out trace.json                      # open it at ui.perfetto.dev
  weft draw recording --out traces/                         # a trace for each rank, for HolisticTraceAnalysis
  weft draw plan.json recording --step 5 --out compared.html    # the first above the second
"""
FORMATS = (".html", ".svg", ".png", ".json")
FOLDER = "/"
"""At the end of a name: a folder of traces, one a rank."""


class _Input(NamedTuple):
    name: str
    timeline: Timeline


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "draw",
        help="draw a recorded or simulated timeline",
        description="Draws a timeline: a page to look around in (.html), a picture of one step (.svg, .png), "
        "or a trace for Perfetto and chrome://tracing (.json); or a folder of traces, one a rank, for "
        "HolisticTraceAnalysis (a name that ends in /).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "timelines",
        nargs="+",
        metavar="timeline",
        help="a folder that weft run --record wrote, the file of one rank, or a timeline as JSON; two for a page",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help=f"what to write: a file that ends in {', '.join(FORMATS)}, or a folder that ends in {FOLDER}",
    )
    parser.add_argument(
        "--step",
        type=partial(count, most=LARGEST),
        metavar="N",
        help="one step; without it pictures and comparisons show the last whole one, all others all",
    )
    parser.add_argument("--title", help="what stands above it (default: the name of the input)")
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    out = Path(options.out)
    folder = options.out.endswith(FOLDER)
    if not folder and out.suffix not in FORMATS:
        raise UsageError(f'--out is "{out}": write a name that ends in {", ".join((*FORMATS, FOLDER))}')
    most = 2 if out.suffix == ".html" and not folder else 1
    if len(options.timelines) > most:
        raise UsageError(
            f"{len(options.timelines)} timelines are given; a page (.html) shows up to 2, other files 1: "
            "leave some out"
        )
    inputs = [_read(Path(name)) for name in options.timelines]
    compared = len(inputs) > 1
    if options.step is not None or compared or out.suffix in (".svg", ".png"):
        inputs = [_one_step(entry, options.step, compared) for entry in inputs]
    title = options.title or " and ".join(entry.name for entry in inputs)
    if folder:
        files = rank_traces(inputs[0].timeline)
        make_folder(out)
        for name, content in files.items():
            write(out / name, content)
        print(f"wrote {len(files)} traces into {shown_path(out)}{FOLDER}")
        return 0
    print(wrote(out, _WRITERS[out.suffix](title, inputs), *(entry.timeline for entry in inputs)))
    return 0


def _read(path: Path) -> _Input:
    """A folder or a file, by what it is; warnings are printed at once."""
    with translated(f'"{shown_path(path)}" cannot be read'):
        is_text = path.suffix == ".json" and path.is_file()
    if is_text:
        return _Input(path.name, read_file(path, Timeline.from_json))
    recording = read_recording(path)
    for warning in recording.warnings:
        print(f"weft draw: warning: {warning}", file=sys.stderr)
    return _Input(path.resolve().name, recording.timeline)


def _one_step(entry: _Input, step: int | None, compared: bool) -> _Input:
    """The step that was asked for, or the last whole one. A timeline without steps (a simulated one) is one step."""
    steps = entry.timeline.steps
    if not steps and (step is None or compared):
        return entry
    if step is None:
        step = last_whole_step(entry.timeline)
        if len(steps) > 1:
            print(f"weft draw: step {step} of {steps[0]} to {steps[-1]} is drawn; --step N draws another one")
    timeline = entry.timeline.of_step(step)
    return _Input(f"{entry.name}, step {step}", timeline.shifted(-timeline.start_s))


def last_whole_step(timeline: Timeline) -> int:
    """The last step that every rank came to the end of; the last one of all if there is none."""
    ended: dict[int, set[int]] = {}
    for span in timeline.spans:
        if span.kind == "step" and span.step >= 0:
            ended.setdefault(span.step, set()).add(span.rank)
    whole = [step for step, ranks in ended.items() if len(ranks) == len(timeline.ranks)]
    return max(whole) if whole else timeline.steps[-1]


_WRITERS: dict[str, Callable[[str, list[_Input]], str | bytes]] = {
    ".html": lambda title, inputs: page(title, [Entry(*entry) for entry in inputs]),
    ".svg": lambda title, inputs: timeline_svg(inputs[0].timeline, title),
    ".png": lambda title, inputs: timeline_png(inputs[0].timeline, title),
    ".json": lambda title, inputs: chrome_trace(inputs[0].timeline, title),
}


def wrote(out: Path, content: str | bytes, *timelines: Timeline) -> str:
    """Write a file, and say what it shows: its path, ranks, steps and size."""
    write(out, content)
    ranks = len({rank for timeline in timelines for rank in timeline.ranks})
    steps = len({step for timeline in timelines for step in timeline.steps})
    counts = [
        f"{number} {what}{'' if number == 1 else 's'}"
        for number, what in ((ranks, "rank"), (steps, "step"))
        if number
    ]
    size = len(content.encode() if isinstance(content, str) else content)
    return f"wrote {shown_path(out)}: {', '.join([*counts, format_bytes(size)])}"


def make_folder(out: Path) -> None:
    """Make a folder, if it is not there; a `UsageError` says why that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error


def write(out: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all; a `UsageError` says why that cannot be."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if out.exists() and not out.is_file():  # a pipe, say
            out.write_bytes(data)
            return
        target = out.resolve()
        part = partial_file(target, os.getpid())
        try:
            part.write_bytes(data)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{shown_path(out)} cannot be written: {error.strerror}") from error


def partial_file(out: Path, process: int) -> Path:
    """Where a process writes a file before it takes its place."""
    return out.with_name(f".{out.name}.{process}")
