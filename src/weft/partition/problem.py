"""The problem that a partitioner solves: a graph, the partitions, and what limits them.

With `chunks` above 1 a partition gets several segments of the program, so that microbatches visit it
several times. `owners` says which one goes where; three partitions, two chunks:

    segment         0  1  2  3  4  5
    looped          0  1  2  0  1  2
    v               0  1  2  2  1  0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weft.errors import PlacementError
from weft.graph.model import Graph
from weft.partition.chain.links import Chain, make_links
from weft.partition.cost import COPIES, cost_shares

LAYOUTS = ("looped", "v")


@dataclass(frozen=True)
class Device:
    """The device of a partition.

    Attributes:
        speed: Units take their time divided by this.
        memory_bytes: How much its units may take; any amount if not given.
    """

    speed: float = 1.0
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class Problem:
    """A graph to be put on partitions.

    Attributes:
        graph: Units in program order, and the tensors between them.
        partitions: How many partitions there are.
        chunks: How many segments each partition gets.
        layout: `looped` or `v`: which partition gets which segment.
        devices: One for each partition, in order; equal ones without a limit if empty.
        transfer_s: Bytes to the seconds that moving them to another partition takes; None: no time.
        memory_weight: From 0 (time alone is balanced) to 1 (memory alone).
        in_flight: How many microbatches each segment holds at most; 1 if empty. `in_flight` computes it.
        fixed: Unit name to the partition that it must go to.
        copies: What parameters take, in multiples of their bytes: with gradients and optimizer state.
    """

    graph: Graph
    partitions: int
    chunks: int = 1
    layout: str = "looped"
    devices: tuple[Device, ...] = ()
    transfer_s: Callable[[float], float] | None = None
    memory_weight: float = 0.0
    in_flight: tuple[int, ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    copies: int = COPIES

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise PlacementError("; ".join(faults))
        if not self.devices:
            object.__setattr__(self, "devices", (Device(),) * self.partitions)
        if not self.in_flight:
            object.__setattr__(self, "in_flight", (1,) * self.segments)

    @property
    def segments(self) -> int:
        """The number of segments that the program is cut into."""
        return self.partitions * self.chunks

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The partition of each segment."""
        return owners(self.partitions, self.chunks, self.layout)

    @cached_property
    def chain(self) -> Chain:
        """The units as links that are cut."""
        return Chain(make_links([unit.group for unit in self.graph], self.fixed_units), self.partitions)

    @cached_property
    def spread_units(self) -> frozenset[int]:
        """The units of groups between whose units others stand."""
        return frozenset(unit for link in self.chain.spread for unit in link.units)

    @cached_property
    def limited(self) -> bool:
        """True if a device has a memory limit."""
        return any(device.memory_bytes < math.inf for device in self.devices)

    @cached_property
    def fixed_units(self) -> dict[int, int]:
        """`fixed`, with units as numbers."""
        return {self.graph.index[name]: partition for name, partition in self.fixed.items()}

    @cached_property
    def shares(self) -> tuple[list[float], list[float]]:
        """For each unit its part of the cost by memory and by time; together they add up to 1."""
        held = round(sum(self.in_flight) / len(self.in_flight))
        return cost_shares(self.graph, self.memory_weight, held, self.copies)

    @cached_property
    def cost_of_ms(self) -> float:
        """The cost of a millisecond."""
        total = sum(unit.time_ms for unit in self.graph)
        return sum(self.shares[1]) / total if total else 0.0

    def transfer_ms(self, size: float) -> float:
        """The milliseconds of a tensor that crosses, at each of its ends: its value there, its gradient back."""
        return 0.0 if self.transfer_s is None else 2e3 * self.transfer_s(size)

    def _faults(self) -> list[str]:
        faults = [
            f"{name} is {value}, it must be at least 1"
            for name, value in (("partitions", self.partitions), ("chunks", self.chunks))
            if value < 1
        ]
        if self.layout not in LAYOUTS:
            faults.append(f'layout is "{self.layout}", it must be one of {", ".join(LAYOUTS)}')
        if not 0.0 <= self.memory_weight <= 1.0:
            faults.append(f"memory_weight is {self.memory_weight}, it must be a number from 0 to 1")
        if self.copies < 0:
            faults.append(f"copies is {self.copies}, it must be at least 0")
        for name, found, wanted, of in (
            ("devices", len(self.devices), self.partitions, "partitions"),
            ("in_flight", len(self.in_flight), self.segments, "segments"),
        ):
            if found not in (0, wanted):
                faults.append(f"{name} has {found} entries, but there are {wanted} {of}")
        for index, device in enumerate(self.devices):
            if not 0.0 < device.speed < math.inf:
                faults.append(f"the speed of device {index} is {device.speed}, it must be a number above 0")
            if not device.memory_bytes >= 0:
                faults.append(f"the memory of device {index} is {device.memory_bytes}, it must be at least 0")
        for segment, held in enumerate(self.in_flight):
            if held < 0:
                faults.append(f"in_flight of segment {segment} is {held}, it must be at least 0")
        for name, partition in self.fixed.items():
            if name not in self.graph.index:
                faults.append(f'fixed names the unit "{name}", which is not in the graph')
            if not 0 <= partition < self.partitions:
                faults.append(
                    f'fixed puts "{name}" on partition {partition}, but there are {self.partitions}'
                )
        if self.fixed and self.chunks > 1:
            faults.append(
                f"fixed says nothing about which of {self.chunks} chunks a unit goes to: "
                "leave fixed out, or give 1 chunk"
            )
        return faults


def owners(partitions: int, chunks: int = 1, layout: str = "looped") -> tuple[int, ...]:
    """The partition of each segment.

    >>> owners(3, 2), owners(3, 2, "v")
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    forth = tuple(range(partitions))
    back = forth[::-1] if layout == "v" else forth
    return sum(((back if chunk % 2 else forth) for chunk in range(chunks)), ())


def in_flight(
    partitions: int, microbatches: int, chunks: int = 1, layout: str = "looped", schedule: str = "1f1b"
) -> tuple[int, ...]:
    """The largest number of microbatches that each segment holds at once.

    `gpipe` holds all `m`. `1f1b` holds `min(m, p - r)` on partition `r` of `p`. With several
    chunks, `looped`: what Megatron's interleaved order (arXiv 2104.04473, section 2.2) holds, which begins
    with `2 (p - r - 1) + (v - 1) p` forwards, `p` microbatches a chunk; `v`: half of what 1F1B over all
    segments would hold, rounded up, as microbatches come at half its pace (so arXiv 2405.15362 has it for
    its V-shaped schedules, whose partitions hold equally much).

    >>> in_flight(4, 8), in_flight(2, 8, chunks=2), in_flight(2, 8, chunks=2, layout="v")
    ((4, 3, 2, 1), (4, 3, 2, 1), (2, 2, 1, 1))
    """
    segments = partitions * chunks
    if schedule == "gpipe":
        return (microbatches,) * segments
    if chunks == 1:
        return tuple(min(microbatches, partitions - partition) for partition in range(partitions))
    if layout == "v":
        return tuple(
            min(microbatches, math.ceil((segments - segment) / chunks)) for segment in range(segments)
        )
    held = [_held(partitions, microbatches, chunks, partition) for partition in range(partitions)]
    return tuple(held[partition][chunk] for chunk in range(chunks) for partition in range(partitions))


def _held(partitions: int, microbatches: int, chunks: int, partition: int) -> list[int]:
    """The peaks of each chunk of a partition in the interleaved order."""
    rounds = range(0, microbatches, partitions)
    sizes = [(start, min(partitions, microbatches - start)) for start in rounds]
    forwards = [chunk for _, size in sizes for chunk in range(chunks) for _ in range(size)]
    backwards = [chunks - 1 - chunk for chunk in forwards]
    warmup = min(len(forwards), 2 * (partitions - partition - 1) + (chunks - 1) * partitions)
    held, peak = [0] * chunks, [0] * chunks
    for step, chunk in enumerate(forwards):
        held[chunk] += 1
        peak[chunk] = max(peak[chunk], held[chunk])
        if step >= warmup:
            held[backwards[step - warmup]] -= 1
    return peak
