"""`weft partition`: which units go to which partition."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from weft.cli.options import count, each, read_graph, size_faults
from weft.errors import ConfigError
from weft.partition import ALGORITHMS, LAYOUTS, Device, Placement, Problem, in_flight, place
from weft.plan.stages import base_option, refined, step_s
from weft.report.text import PlacementRow, placement_table, table
from weft.simulate import FREE, Links
from weft.topology.cluster import Link
from weft.units import format_bytes, parse_bytes
from weft.untrusted import shown_text

_EXAMPLES = """\
examples:
  weft partition gpt.graph.json --partitions 8 --memory 24GiB
  weft partition resnet50.txt --partitions 4 --link 25GB/s,5us --json
  weft partition gpt.graph.json --partitions 2 --memory 24GiB,16GiB --speeds 2,1
"""


UNEVEN = 1.5
"""Of the mean: what the busiest partition may have without a warning."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "partition",
        help="put the units of a model on partitions",
        description="Reads a graph (weft's JSON, or a profile in PipeDream's text format) and balances it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the graph")
    parser.add_argument("--partitions", type=count, required=True, metavar="P", help="how many partitions")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="what each device has, for example 24GiB; or one for each: 24GiB,16GiB",
    )
    parser.add_argument("--speeds", metavar="S", help="how fast the devices are, one for each: 1,1,0.5")
    parser.add_argument(
        "--link", metavar="LINK", help="what a transfer takes, for example 25GB/s,5us (default: nothing)"
    )
    parser.add_argument(
        "--memory-weight",
        type=float,
        default=0.0,
        metavar="W",
        help="0 balances time, 1 memory, and what lies between both (default: 0)",
    )
    parser.add_argument(
        "--microbatches",
        type=count,
        metavar="M",
        help="how many make a step (default: as many as partitions)",
    )
    parser.add_argument(
        "--chunks", type=count, default=1, metavar="V", help="segments for each partition (default: 1)"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="looped", help="of chunks (default: looped)")
    parser.add_argument(
        "--algorithm", choices=list(ALGORITHMS), default="exact", help="how to split (default: exact)"
    )
    parser.add_argument(
        "--refine",
        action="store_true",
        help="move cuts for as long as the simulated step gets shorter, though the largest partition may grow",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    microbatches = options.partitions if options.microbatches is None else options.microbatches
    link = None if options.link is None else Link.parse(options.link)
    placement = place(_problem(options, microbatches, link), options.algorithm)
    links = FREE if link is None else Links.uniform(link)
    if options.refine:
        placement = refined(placement, microbatches, links)
    step_ms = 1e3 * step_s(placement, microbatches, links)
    show = _json if options.json else _tables
    print(show(placement, microbatches, step_ms))
    return 0


def _problem(options: argparse.Namespace, microbatches: int, link: Link | None) -> Problem:
    count = options.partitions
    if count < 1:
        raise ConfigError(f"--partitions is {count}: it must be at least 1, for example --partitions 4")
    if microbatches < 1:
        raise ConfigError(f"--microbatches is {microbatches}: it must be at least 1")
    if options.chunks < 1:
        raise ConfigError(f"--chunks is {options.chunks}: it must be at least 1")
    if faults := size_faults(count, options.chunks):
        raise ConfigError(faults[0])
    memory = [math.inf] * count
    if options.memory is not None:
        memory = [float(size) for size in each(options.memory, count, "--memory", parse_bytes)]
    speeds = each(options.speeds or "1", count, "--speeds", _number)
    return Problem(
        read_graph(options.file),
        count,
        chunks=options.chunks,
        layout=options.layout,
        devices=tuple(Device(speed, size) for speed, size in zip(speeds, memory, strict=True)),
        transfer_s=None if link is None else link.transfer_s,
        memory_weight=options.memory_weight,
        in_flight=in_flight(count, microbatches, options.chunks, options.layout),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f'"{shown_text(text)}" is not a speed: write a number, for example --speeds 1,0.5'
        ) from None


def _json(placement: Placement, microbatches: int, step_ms: float) -> str:
    problem = placement.problem
    partitions = [
        {
            "index": index,
            "units": [unit.name for unit in placement.units_of(index)],
            "time_ms": load.time_ms,
            "compute_ms": load.compute_ms,
            "transfer_ms": load.transfer_ms,
            "parameter_bytes": load.parameter_bytes,
            "activation_bytes": load.activation_bytes,
            "memory_bytes": load.memory_bytes,
            "cost": load.cost,
        }
        for index, load in enumerate(placement.loads)
    ]
    segments = dict(zip((unit.name for unit in problem.graph), placement.segments, strict=True))
    return json.dumps(
        {
            "partitions": partitions,
            "step_ms": step_ms,
            "largest_ms": placement.largest_ms,
            "largest_cost": placement.largest_cost,
            "bound": placement.bound,
            "optimal": placement.optimal,
            "microbatches": microbatches,
            "segments": segments,
        },
        indent=2,
    )


def _tables(placement: Placement, microbatches: int, step_ms: float) -> str:
    problem, loads = placement.problem, placement.loads
    rows = [
        PlacementRow(
            unit.name,
            partition,
            unit.parameters,
            unit.parameter_bytes,
            unit.forward_ms,
            unit.backward_ms,
        )
        for unit, partition in zip(problem.graph, placement.partitions, strict=True)
    ]
    mean = sum(load.cost for load in loads) / len(loads) or 1.0
    summary = [
        (
            index,
            len(placement.units_of(index)),
            f"{load.time_ms:.3f}",
            f"{load.transfer_ms:.3f}",
            format_bytes(load.parameter_bytes),
            format_bytes(load.memory_bytes),
            "" if device.memory_bytes == math.inf else format_bytes(device.memory_bytes),
            f"{load.cost / mean:.1%}",
        )
        for index, (load, device) in enumerate(zip(loads, problem.devices, strict=True))
    ]
    headers = ("partition", "units", "time ms", "transfer ms", "parameters", "memory", "limit", "of mean")
    known = "the least possible" if placement.optimal else f"none is below {placement.bound / mean:.1%}"
    return "\n\n".join(
        (
            placement_table(rows),
            table(headers, summary, ">" * len(headers)),
            f"largest partition: {placement.largest_ms:.3f} ms, {placement.largest_cost / mean:.1%} of the mean "
            f"({known})\n"
            f"a step of {microbatches} microbatches by {base_option(problem)}: {step_ms:.3f} ms "
            "(weft simulate tries all schedules)",
            *_uneven(placement, mean),
        )
    )


def _uneven(placement: Placement, mean: float) -> list[str]:
    """A warning if the split is uneven and cannot be better; nothing otherwise."""
    graph, loads = placement.problem.graph, placement.loads
    empty = sum(not placement.units_of(index) for index in range(len(loads)))
    if placement.largest_cost <= UNEVEN * mean and not empty:
        return []
    largest = max(graph, key=lambda unit: unit.time_ms)
    idle = f"{empty} of {len(loads)} partitions have no units; " if empty else ""
    return [
        f"warning: {idle}the busiest has {placement.largest_cost / mean:.0%} of the mean. The largest unit, "
        f"{shown_text(largest.name)}, takes {largest.time_ms:.3f} ms of {sum(load.time_ms for load in loads):.3f} "
        "ms in all: open it (weft trace --units), or give fewer partitions"
    ]
