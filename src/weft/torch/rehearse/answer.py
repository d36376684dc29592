"""The answer of a rehearsal: the memory of a rank of each partition by what takes it, and the step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from weft.torch.offload.states import BUCKET_BYTES
from weft.units import format_bytes, format_seconds

UNKNOWN_MOMENTS = 2
"""Numbers that an optimizer keeps for a weight where none has stepped: as many as Adam."""
FITS, DOES_NOT_FIT = 0, 3
"""Exit codes."""


@dataclass(frozen=True)
class Weight:
    """A parameter as each rank of its partition has it.

    Attributes:
        key: Its id.
        partition: Where it lies.
        nbytes: This rank's part of it.
        share: That part, from 0 to 1.
        trained: Whether it gets gradients.
        expert: Whether replicas share the experts to which it belongs.
    """

    key: int
    partition: int
    nbytes: float
    share: float
    trained: bool
    expert: bool = False


@dataclass(frozen=True)
class Part:
    """The memory of a rank of one partition, in bytes.

    Attributes:
        partition: Its number.
        units: Its first and its last unit, and how many there are.
        weights: Parameters and buffers.
        gradients: Of the parameters that are trained.
        states: What the optimizer keeps.
        activations: At the peak, of all microbatches that it holds.
        reserved: The driver's and the libraries' own.
        fresh: A new gradient of the largest weight, before it is added to that of earlier microbatches.
        copies: Of the gradients, which replicas average when no activation is left.
        update: What the optimizer's step makes and drops.
        host: Offloaded states, activations and weights, in host memory.
        may_wait: Weights on the device that could be there, too.
    """

    partition: int
    units: tuple[str, str, int]
    weights: float
    gradients: float
    states: float
    activations: float
    reserved: float
    fresh: float = 0.0
    copies: float = 0.0
    update: float = 0.0
    host: float = 0.0
    may_wait: float = 0.0

    @property
    def scratch(self) -> float:
        """Memory besides, at the peak: in a backward pass, when gradients are averaged, or in the update."""
        return max(self.activations + self.fresh, self.copies, self.update) - self.activations

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.states + self.activations + self.scratch + self.reserved


@dataclass(frozen=True)
class Answer:
    """The findings of a rehearsal.

    Attributes:
        layout: The job in words.
        device: The name of the device.
        memory_bytes: What it has.
        parts: The memory of a rank, by partition.
        weights: The parameters.
        state_replicas: How many replicas share optimizer states alone.
        offloads_states: Whether optimizer states wait in host memory.
        step_s: A step's seconds.
        bubble: The share of a pipeline's time in which its ranks wait.
        sum_s: The part of the step in which gradients are averaged and nothing else is done.
        update_s: The optimizer's.
        crossing_bytes: The most that goes from one partition to another, for each microbatch.
        trains: Whether the traced step has a backward pass.
        microbatches: How many a step has.
        replicas: How many there are.
    """

    layout: str
    device: str
    memory_bytes: float
    parts: tuple[Part, ...]
    weights: tuple[Weight, ...]
    state_replicas: int
    offloads_states: bool
    step_s: float
    bubble: float
    sum_s: float
    update_s: float
    crossing_bytes: int
    trains: bool
    microbatches: int
    replicas: int

    @property
    def fullest(self) -> Part:
        """The part of the rank that takes most."""
        return max(self.parts, key=lambda part: part.total)

    @property
    def fits(self) -> bool:
        """True if no rank takes more than its device has."""
        return self.fullest.total <= self.memory_bytes

    def with_states(self, measured: Mapping[int, int], at_once: bool = True) -> Answer:
        """The same with what the script's optimizers keep, by parameter; two numbers a weight if none has stepped.

        ``at_once``: they update all weights in a few operations (``foreach``), which takes another copy of them.
        """
        states = [0.0] * len(self.parts)
        for weight in self.weights:
            kept = UNKNOWN_MOMENTS * weight.nbytes if weight.trained else 0.0
            if measured:
                kept = measured.get(weight.key, 0) * weight.share
            states[weight.partition] += kept / (1 if weight.expert else self.state_replicas)
        parts = tuple(self._with(part, kept, at_once) for part, kept in zip(self.parts, states, strict=True))
        return replace(self, parts=parts)

    def _with(self, part: Part, states: float, at_once: bool) -> Part:
        """A part with so many bytes of optimizer states; of offloaded ones three buckets are on the device."""
        update = part.gradients / self.state_replicas if at_once else 2 * part.fresh
        if not self.offloads_states or not part.gradients:
            return replace(part, states=states, update=update)
        there = min(states, 3 * BUCKET_BYTES * states / part.gradients)
        update = min(update, BUCKET_BYTES)
        return replace(part, states=there, update=update, host=part.host + states - there)

    def text(self, took_s: float) -> str:
        """For people."""
        full = self.fullest
        offloads = any(part.host for part in self.parts)
        columns = ["weights", "gradients", "states", "activations", "scratch", "reserved", "total"]
        columns += ["host"] if offloads else []
        rows: list[tuple[str, ...]] = [("partition", "units", *columns)]
        for part in self.parts:
            first, last, count = part.units
            named = first if count < 2 else f"{first} .. {last} ({count})"
            rows.append(
                (str(part.partition), named, *(format_bytes(getattr(part, each)) for each in columns))
            )
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = [f"weft rehearse: {self.layout}", ""]
        for row in rows:
            sizes = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join([row[0].rjust(widths[0]), row[1].ljust(widths[1]), *sizes]))
        of = f"{format_bytes(full.total)} of {format_bytes(self.memory_bytes)}"
        where = f"a rank of partition {full.partition} takes {of} of its {self.device}"
        lines += ["", f"It fits: {where}." if self.fits else f"It does not fit: {where}."]
        if not self.fits:
            lines += [f"  {line}" for line in self._remedies()]
        if self.trains:
            takes = f"A step takes about {format_seconds(self.step_s)}"
            details = [f"bubble {100 * self.bubble:.0f} %"] if len(self.parts) > 1 else []
            if self.sum_s:
                details.append(f"{format_seconds(self.sum_s)} of averaging gradients beside nothing else")
            details.append(f"{format_seconds(self.update_s)} of the optimizer")
            lines.append(f"{takes}: {', '.join(details)}.")
            if len(self.parts) > 1:
                lines.append(
                    f"Between partitions {format_bytes(self.crossing_bytes)} travel for each microbatch."
                )
        else:
            lines.append("The step has no backward pass: this is the memory of an evaluation.")
        lines.append(f"Rehearsed in {format_seconds(took_s)}; times are estimated from the device's rates.")
        return "\n".join(lines)

    def _remedies(self) -> Iterator[str]:
        """Single changes, and what they leave."""
        full = self.fullest
        less: list[tuple[float, str]] = []
        if self.replicas > 1 and self.state_replicas == 1:
            less.append((full.states * (1 - 1 / self.replicas), '"shard_optimizer_state": true'))
        if len(self.parts) > 1:
            more = f'"microbatches": {2 * self.microbatches}, where the batch has the rows'
            less.append((full.activations / 2, more))
        if self.replicas > 1 and self.replicas % 2 == 0:
            kept = full.weights + full.gradients + full.states
            less.append((kept / 2, f'"partitions": {2 * len(self.parts)}, with half the replicas'))
        less.append((0.7 * full.activations, "activation checkpointing of the blocks (about)"))
        if not self.offloads_states:
            less.append((full.states, '"offload_optimizer": true'))
        if full.may_wait:
            less.append((full.may_wait, '"offload_weights": true'))
        for saved, remedy in sorted(less, reverse=True):
            left = full.total - saved
            verdict = "fits" if left <= self.memory_bytes else "is not enough alone"
            yield f"{remedy}: {format_bytes(left)}, {verdict}"

    def to_json(self) -> str:
        """For programs."""
        record = {name: value for name, value in asdict(self).items() if name != "weights"}
        record["parts"] = [
            {**asdict(part), "scratch": part.scratch, "total": part.total} for part in self.parts
        ]
        return json.dumps({"weft": "rehearsal", "version": 1, "fits": self.fits, **record}, indent=1)
