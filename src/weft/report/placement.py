"""The evenness of a model's split: a value that prints as a table, and says what is wrong with it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.report.text import PlacementRow, placement_table, table
from weft.terminal_text import visible
from weft.units import format_bytes

UNEVEN = 1.25
"""A partition with more than so many times the mean time is reported, ..."""
LEAST_MS = 1.0
"""... if that costs more than this for each microbatch: what takes less is hardly measured."""
WIDTH = 20


class Share(NamedTuple):
    """The share of a model on one partition.

    Attributes:
        units: How many units lie on it.
        parameters: Elements of its parameters.
        parameter_bytes: Bytes of its parameters.
        memory_bytes: With gradients, an optimizer's two moments and the activations of the microbatches in flight.
        time_ms: Forward and backward pass of one microbatch.
        time_share: Of all partitions, from 0 to 1.
        memory_share: Of all partitions, from 0 to 1.
    """

    partition: int
    units: int
    parameters: int
    parameter_bytes: int
    memory_bytes: int
    time_ms: float
    time_share: float
    memory_share: float


@dataclass(frozen=True)
class ModelPlacement:
    """Where the units of one model lie.

    Attributes:
        units: A row for each unit, in the order of the program.
        partitions: How many there are.
        optimize: What the split balances first, `memory` or `speed`; empty if the script placed the units.
        microbatches: How many a step has.
        measured: Whether that number was taken by measured costs, and is none to warn of.
    """

    units: tuple[PlacementRow, ...]
    partitions: int
    optimize: str = ""
    microbatches: int = 1
    measured: bool = False

    @property
    def shares(self) -> list[Share]:
        """The share of each partition, in rank order."""
        time_ms = sum(map(_time_ms, self.units)) or 1.0
        memory = sum(unit.memory_bytes for unit in self.units) or 1
        found = []
        for partition in range(self.partitions):
            own = [unit for unit in self.units if unit.partition == partition]
            own_ms, own_bytes = sum(map(_time_ms, own)), sum(unit.memory_bytes for unit in own)
            found.append(
                Share(
                    partition, len(own), sum(unit.parameters for unit in own), sum(unit.bytes for unit in own),
                    own_bytes, own_ms, own_ms / time_ms, own_bytes / memory,
                )
            )  # fmt: skip
        return found

    @property
    def warnings(self) -> list[str]:
        """Warnings about what makes steps slower than they need be, and what to do."""
        return [*self._overlap(), *self._uneven()]

    def _overlap(self) -> Iterator[str]:
        if self.partitions > 1 and self.microbatches == 1 and not self.measured:
            yield (
                "microbatches is 1, so the partitions work one after the other and never at the same time: set "
                f"microbatches to {2 * self.partitions}, say"
            )

    def _uneven(self) -> Iterator[str]:
        shares = self.shares
        slowest = max(shares, key=lambda share: share.time_ms)
        fastest = min(shares, key=lambda share: share.time_ms)
        mean_ms = sum(share.time_ms for share in shares) / len(shares)
        if slowest.time_ms <= UNEVEN * mean_ms or slowest.time_ms - mean_ms < LEAST_MS:
            return
        rest = (
            f"{slowest.time_ms / fastest.time_ms:.1f} times as much as partition {fastest.partition}"
            if fastest.time_ms
            else f"and partition {fastest.partition} has nothing to do"
        )
        own = [unit for unit in self.units if unit.partition == slowest.partition]
        largest = max(own, key=_time_ms)
        part = _time_ms(largest) / (sum(map(_time_ms, self.units)) or 1.0)
        yield (
            f"partition {slowest.partition} takes {slowest.time_share:.0%} of the time, {rest}: the others wait for "
            f"it. Its slowest unit is {visible(largest.unit)} ({_time_ms(largest):.1f} ms, {part:.0%}): "
            + self._remedy(part)
        )

    def _remedy(self, part: float) -> str:
        if self.optimize == "memory":
            return 'the setting optimize is "memory", which balances memory before time; set optimize=speed'
        if part * self.partitions > UNEVEN:
            return (
                "no split is even while it is one unit; build it of smaller modules, or use fewer partitions"
            )
        if not self.optimize:
            return "the script placed it there; move units to other partitions, or set auto_partition=true"
        return "it cannot be cut where that would help; more and smaller modules can"

    def tables(self) -> str:
        """A row for each unit, then one for each partition."""
        if not self.units:
            return "one partition: the whole model on every rank"
        shares = self.shares
        headers = ("partition", "units", "parameters", "ms", "time", "", "memory", "share")
        rows = [
            (
                share.partition, share.units, f"{share.parameters:,}", f"{share.time_ms:.2f}",
                f"{share.time_share:.1%}", bar(share.time_share), format_bytes(share.memory_bytes),
                f"{share.memory_share:.1%}",
            )
            for share in shares
        ]  # fmt: skip
        return f"{placement_table(self.units)}\n\n{table(headers, rows, '>>>>><>>')}"

    def __str__(self) -> str:
        warnings = [f"warning: {warning}" for warning in self.warnings] if self.units else []
        return "\n\n".join([self.tables(), *warnings])

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            "optimize": self.optimize or None,
            "microbatches": self.microbatches,
            "partitions": [share._asdict() for share in self.shares] if self.units else [],
            "units": [unit._asdict() for unit in sorted(self.units, key=lambda unit: unit.partition)],
            "warnings": self.warnings if self.units else [],
        }


@dataclass(frozen=True)
class PartitionReport:
    """Where everything lies: ``print`` it, take ``to_dict()`` for JSON; a notebook shows it as tables.

    Attributes:
        models: One for each model.
        reasons: Why `auto` has chosen its schedule and its number of microbatches; empty otherwise.
    """

    models: tuple[ModelPlacement, ...]
    reasons: str = ""

    @property
    def warnings(self) -> list[str]:
        """Warnings about what makes steps slower than they need be, and what to do."""
        return [warning for model in self.models if model.units for warning in model.warnings]

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.models), *([self.reasons] if self.reasons else [])])

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {"models": [model.to_dict() for model in self.models], "reasons": self.reasons or None}

    def _repr_html_(self) -> str:
        return "".join(f"<pre>{html.escape(str(model))}</pre>" for model in self.models) + (
            f"<pre>{html.escape(self.reasons)}</pre>" if self.reasons else ""
        )


def bar(share: float, width: int = WIDTH) -> str:
    """A bar that is full at 1.

    >>> bar(0.25, width=8)
    '##......'
    """
    full = round(min(max(share, 0.0), 1.0) * width)
    return "#" * full + "." * (width - full)


def _time_ms(unit: PlacementRow) -> float:
    return unit.forward_ms + unit.backward_ms


__all__: Sequence[str] = ["ModelPlacement", "PartitionReport", "Share", "bar"]


@dataclass
class Opening:
    """A line for the end of the first step: what was split, by which schedule, and what the step has proved.

    Attributes:
        models: The name of each split model, and where its units lie.
        proof: What the first step says of the split beside one process, in words; empty where nothing is split.
        shown: The line has been printed.
    """

    models: list[tuple[str, ModelPlacement]] = field(default_factory=list)
    proof: str = ""
    shown: bool = False

    def add(self, name: str, placement: ModelPlacement) -> None:
        """Note a model that is split into several partitions."""
        if placement.partitions > 1 and placement.units and not self.shown:
            self.models.append((name, placement))

    def text(self, schedule: str, microbatches: int, ways: Sequence[str] = ()) -> str:
        """The line.

        Args:
            schedule: What the field calls it.
            microbatches: Into how many the mini-batch was cut.
            ways: What else ranks share, in words: "2 data-parallel replicas".

        >>> Opening().text("1F1B", 4, ["2 data-parallel replicas"])
        '2 data-parallel replicas, 4 microbatches'
        """
        split = [
            (f"{visible(name)}: " if len(self.models) > 1 else "") + _split(placement)
            for name, placement in self.models
        ]
        parts = ["; ".join(split), schedule] if split else []
        parts += [*ways, f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}"]
        return ", ".join(parts) + (f"; {self.proof}" if self.proof else "")


def _split(placement: ModelPlacement) -> str:
    shares = placement.shares
    units = _listed([str(share.units) for share in shares])
    times = " / ".join(f"{share.time_share:.0%}".replace("%", " %") for share in shares)
    measured = f" ({times} of the time)" if any(share.time_ms for share in shares) else ""
    return f"{placement.partitions} partitions of {units} units{measured}"


def _listed(parts: Sequence[str]) -> str:
    """`4, 4 and 5`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
