"""`weft simulate`: what a training step would take, and which schedule takes least."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import schedule
from weft.cli.draw import write
from weft.cli.options import count, each, links, read_graph, size_faults
from weft.errors import ConfigError, PlacementError
from weft.graph import Graph
from weft.plan.explain import explain, nothing_fits
from weft.plan.option import Option, options
from weft.plan.replicas import added_up_s, sharing_states
from weft.plan.search import Found, search
from weft.plan.stages import Placer, choices
from weft.report.page import Entry, page
from weft.report.picture import timeline_png, timeline_svg
from weft.report.text import table
from weft.schedule.legal import check
from weft.schedule.table import having
from weft.simulate import Simulation
from weft.timeline import Timeline
from weft.topology.cluster import Link
from weft.units import format_bytes, parse_bytes
from weft.untrusted import read_file

_EXAMPLES = """\
examples:
  weft simulate gpt.graph.json --partitions 8 --microbatches 32 --link 25GB/s,5us --html plan.html
  weft simulate gpt.graph.json --partitions 8 --microbatches 32 --memory 24GiB
  weft simulate resnet50.txt --partitions 4 --microbatches 16 --schedule interleaved_1f1b --chunks 3
  weft simulate gpt.graph.json --partitions 16 --link 300GB/s,2us --inter-link 25GB/s,5us,shared --ranks-per-host 8
"""
FREE_LINK = "0us"
OUT = (".svg", ".png", ".json")
CHUNKED = (*having(lambda kind: kind.free_chunks), "list")
LIMITED = having(lambda kind: kind.limited)
SILENT_S = 2.0
"""A search that is shorter shows nothing."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="what a step would take, by which schedule",
        description="Reads a graph (weft's JSON, or a profile in PipeDream's text format), puts its units on "
        "partitions and simulates the step, by one schedule or by all of them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the graph")
    parser.add_argument("--partitions", type=count, required=True, metavar="P", help="how many ranks")
    parser.add_argument(
        "--microbatches",
        type=count,
        metavar="M",
        help="how many make the step (default: as many as partitions)",
    )
    parser.add_argument(
        "--schedule",
        type=schedule.named,
        choices=("auto", *schedule.NAMES),
        default="auto",
        help="auto tries all and takes the fastest that fits (default: auto)",
    )
    parser.add_argument("--chunks", type=count, metavar="V", help=f"stages a rank, for {', '.join(CHUNKED)}")
    parser.add_argument(
        "--active",
        type=count,
        metavar="N",
        help=f"most microbatches that a rank holds, for {', '.join(LIMITED)}",
    )
    parser.add_argument("--csv", metavar="CSV", help="the schedule, for file")
    _add_machine(parser)
    parser.add_argument(
        "--memory-weight", type=float, default=0.0, metavar="W",
        help="units are balanced by time (0, the default), by memory (1), or by both (between)",
    )  # fmt: skip
    parser.add_argument(
        "--replicas",
        type=count,
        default=1,
        metavar="N",
        help="replicas of the pipeline, which all-reduce gradients",
    )
    parser.add_argument(
        "--shard-optimizer-state", action="store_true", help="replicas share the optimizer's states"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--html", metavar="FILE", help="write a page with the step to look around in")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write a picture of the step (.svg, .png), or the timeline (.json) for weft draw",
    )
    parser.set_defaults(handler=main)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", metavar="LINK", help="between ranks: 25GB/s,5us (default: takes no time)")
    parser.add_argument("--inter-link", metavar="LINK", help="between ranks of different hosts")
    parser.add_argument("--ranks-per-host", type=count, metavar="K", help="ranks on one host (default: all)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="what a rank has, for example 24GiB; or one for each: 24GiB,16GiB"
    )


class SearchProgress:
    """A line on the terminal while a search takes long: how far it is, and the best step so far; `close` erases it.

    Args:
        silent_s: For how long nothing is shown, in seconds.
    """

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self.begin = time.monotonic()
        self.silent_s = silent_s
        self.shown = False

    def __call__(self, done: int, of: int, best_s: float | None) -> None:
        if time.monotonic() - self.begin < self.silent_s or not sys.stderr.isatty():
            return
        best = "" if best_s is None else f", best step so far {best_s * 1e3:.3f} ms"
        print(f"\r\x1b[Ktried {done} of {of}{best}; Ctrl-C takes it", end="", file=sys.stderr, flush=True)
        self.shown = True

    def close(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def main(options: argparse.Namespace) -> int:
    asked = _read(options)
    progress = SearchProgress()
    try:
        tried = _options_asked(options)
        found = _by_file(asked) if options.schedule == "file" else choices(asked.placer, tried, progress)
    finally:
        progress.close()
    best = found[0]
    if best.fault:
        raise PlacementError(_no_choice(options.schedule, found, asked.placer))
    step = best.step
    assert step is not None
    if options.html:
        title = f"{Path(options.file).name}: {best.option}, {asked.placer.microbatches} microbatches"
        write(Path(options.html), page(title, [Entry("simulated", step.timeline)]))
    if options.out:
        write(Path(options.out), _picture(Path(options.out), step.timeline, f"{best.option}"))
    if options.json:
        print(json.dumps(_as_json(asked, found, step), indent=2))
    else:
        print(_as_text(asked, best, step))
        if options.schedule == "auto":
            print(f"\n{explain(found)}")
    return 0


@dataclass(frozen=True)
class _Asked:
    """The options, read and checked."""

    graph: Graph
    placer: Placer
    csv: str | None
    """The text of a schedule."""
    replicas: int
    between_replicas: Link

    def reduce_s(self, found: Found) -> float:
        """The seconds that replicas take to all-reduce gradients after the step."""
        if self.replicas == 1:
            return 0.0
        assert found.placed is not None
        partitions = found.placed.placement.partitions
        return added_up_s(self.graph, partitions, self.replicas, self.between_replicas)


def _read(options: argparse.Namespace) -> _Asked:
    ranks = options.partitions
    microbatches = ranks if options.microbatches is None else options.microbatches
    faults = [
        f"--{name} is {value}: it must be at least 1"
        for name, value in (
            ("partitions", ranks),
            ("microbatches", microbatches),
            ("chunks", options.chunks),
            ("active", options.active),
            ("ranks-per-host", options.ranks_per_host),
            ("replicas", options.replicas),
        )
        if value is not None and value < 1
    ]
    faults += [
        f"--{name} is for --schedule {' or '.join(owners)}, not for {options.schedule}: leave it out"
        for name, owners in (("chunks", CHUNKED), ("active", LIMITED), ("csv", ("file",)))
        if getattr(options, name) is not None and options.schedule not in owners
    ]
    if options.schedule == "file" and options.csv is None:
        faults.append("--schedule file needs the schedule: --csv schedule.csv")
    if options.out and Path(options.out).suffix not in OUT:
        faults.append(f'--out is "{options.out}": write a name that ends in {", ".join(OUT)}')
    if not 0.0 <= options.memory_weight <= 1.0:
        faults.append(f"--memory-weight is {options.memory_weight}: it must be a number from 0 to 1")
    if options.inter_link is not None and options.ranks_per_host is None:
        faults.append("--inter-link needs to know the hosts: --ranks-per-host 8")
    faults = faults or size_faults(ranks, options.chunks or 1, microbatches)
    if faults:
        raise ConfigError("; ".join(faults))
    csv = None
    if options.csv is not None:
        given = read_file(options.csv, schedule.from_csv)
        csv = schedule.to_csv(given)
        microbatches = options.microbatches or given.microbatches
        check(schedule.make("file", ranks, microbatches, text=csv))
    graph = read_graph(options.file)
    counted = sharing_states(graph, options.replicas) if options.shard_optimizer_state else graph
    memory = None if options.memory is None else each(options.memory, ranks, "--memory", parse_bytes)
    return _Asked(
        graph,
        Placer(counted, ranks, microbatches, links(options), memory, options.memory_weight),
        csv,
        options.replicas,
        Link.parse(options.inter_link or options.link or FREE_LINK),
    )


def _options_asked(asked: argparse.Namespace) -> list[Option] | None:
    """The options of the schedule that was asked for; None for all."""
    name, chunks = asked.schedule, asked.chunks
    if name == "auto":
        return None
    if name != "list":
        return [Option(name, chunks=chunks, active=asked.active)]
    known = [one for one in options(2, 2) if one.schedule == "list" and not one.recompute]
    likes = [one for one in known if chunks is None or 2 * chunks == len(one.layout(2))]
    return likes or [
        Option("list", like="interleaved_1f1b", chunks=chunks, splits=splits) for splits in (False, True)
    ]


def _by_file(asked: _Asked) -> list[Found]:
    """The schedule of a file, its stages filled as those of others."""
    placer = asked.placer
    return search(
        placer.ranks, placer.microbatches, placer, placer.links,
        memory_bytes=placer.memory_bytes, tried=[Option("file", text=asked.csv)], copies=placer.copies,
        within=placer.within, ahead=placer.ahead,
    )  # fmt: skip


def _no_choice(name: str, found: list[Found], placer: Placer) -> str:
    if name != "auto":
        return f"{found[0].option} is not possible: {found[0].fault}; --schedule auto looks for one that is"
    if (sentence := nothing_fits(found, placer.graph, placer.memory_bytes, placer.copies)) is not None:
        return sentence
    print(explain(found))
    return "no schedule is possible, see above: give more memory, more partitions, or smaller microbatches"


def _picture(out: Path, timeline: Timeline, title: str) -> str | bytes:
    if out.suffix == ".json":
        return timeline.to_json()
    return timeline_svg(timeline, title) if out.suffix == ".svg" else timeline_png(timeline, title)


def _as_text(asked: _Asked, found: Found, step: Simulation) -> str:
    rows = [
        (
            rank,
            len(units),
            *(f"{share:.1%}" for share in (idle.warmup, idle.steady, idle.drain, idle.transfer)),
            format_bytes(peak),
        )
        for rank, (units, idle, peak) in enumerate(
            zip(_units(asked, found), step.idle, step.peak_bytes, strict=True)
        )
    ]
    added = asked.reduce_s(found)
    more = f"; then {asked.replicas} replicas all-reduce gradients for {added * 1e3:.3f} ms" if added else ""
    stages = f"{step.stages} stages on {asked.placer.ranks} ranks"
    return "\n".join(
        (
            f"{found.option}: {stages}, {asked.placer.microbatches} microbatches",
            f"step {step.step_s * 1e3:.3f} ms, bubble {step.bubble:.1%}{more}",
            "",
            table(("rank", "units", "warm-up", "steady", "drain", "transfer", "peak"), rows, ">" * 7),
        )
    )


def _units(asked: _Asked, found: Found) -> list[list[str]]:
    """The names of the units of each rank."""
    assert found.placed is not None
    names: list[list[str]] = [[] for _ in range(asked.placer.ranks)]
    for unit, rank in zip(asked.graph, found.placed.placement.partitions, strict=True):
        names[rank].append(unit.name)
    return names


def _as_json(asked: _Asked, found: list[Found], step: Simulation) -> dict[str, Any]:
    best = found[0]
    assert best.schedule is not None
    return {
        "schedule": best.option.schedule,
        "option": str(best.option),
        "microbatches": asked.placer.microbatches,
        "rank_of_stage": list(best.schedule.rank_of_stage),
        "step_ms": step.step_s * 1e3,
        "reduce_ms": asked.reduce_s(best) * 1e3,
        "bubble": step.bubble,
        "bubble_rate": step.bubble_rate,
        "ranks": [
            {"rank": rank, "units": units, **idle._asdict(), "bubble": idle.bubble, "peak_bytes": peak}
            for rank, (units, idle, peak) in enumerate(
                zip(_units(asked, best), step.idle, step.peak_bytes, strict=True)
            )
        ],
        "choices": [
            {
                "option": str(one.option),
                "step_ms": one.step_s * 1e3 if one.schedule is not None else None,
                "bubble": one.bubble if one.schedule is not None else None,
                "peak_bytes": list(one.peak_bytes),
                "fault": one.fault,
            }
            for one in found
        ],
    }
