"""The step that a job expects when it has made its plan: recordings keep it, and reports lay it beside the measured
one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.document import Document
from weft.simulate import Simulation
from weft.timeline import WORK


@dataclass(frozen=True)
class Part:
    """The expected work and memory of a partition in a step.

    Attributes:
        forward_s: All its forward passes, in seconds.
        backward_s: All its backward passes, whole or in halves.
        memory_bytes: Parameters, gradients, two moments of an optimizer, and the activations that it holds at once.
    """

    forward_s: float
    backward_s: float
    memory_bytes: int = 0

    @property
    def work_s(self) -> float:
        """Forward and backward passes."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Planned:
    """A step as its plan has it: from the begin of the first microbatch to the end of the last one.

    What follows the microbatches (averaging, the optimizer) and what the script does is not in it.

    Attributes:
        step_s: In seconds.
        parts: By partition.
    """

    step_s: float
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, step: Simulation) -> Planned:
        """The expected step by a simulation."""
        work = [{kind: 0.0 for kind in WORK} for _ in step.actions]
        for own, actions, starts, ends in zip(work, step.actions, step.start_s, step.end_s, strict=True):
            for action, start_s, end_s in zip(actions, starts, ends, strict=True):
                own[action.kind] += end_s - start_s
        return cls(
            step.step_s,
            tuple(
                Part(own["F"], own["B"] + own["I"] + own["W"], peak)
                for own, peak in zip(work, step.peak_bytes, strict=True)
            ),
        )

    def plus(self, other: Planned) -> Planned:
        """Both: two models in one step, on the same partitions.

        >>> one = Planned(1.0, (Part(0.25, 0.5, 8),))
        >>> one.plus(one)
        Planned(step_s=2.0, parts=(Part(forward_s=0.5, backward_s=1.0, memory_bytes=16),))
        """
        return Planned(
            self.step_s + other.step_s,
            tuple(
                Part(a.forward_s + b.forward_s, a.backward_s + b.backward_s, a.memory_bytes + b.memory_bytes)
                for a, b in zip(self.parts, other.parts, strict=True)
            ),
        )

    def to_record(self) -> dict[str, Any]:
        """The value that `from_document` reads."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Planned:
        """The same from a record that was not read from a file."""
        return cls(record["step_s"], tuple(Part(**part) for part in record["parts"]))

    @classmethod
    def from_document(cls, document: Document) -> Planned:
        """The same from a file.

        Raises:
            FormatError: It is none; the error names the fault by its path.
        """
        return cls(
            document["step_s"].number(),
            tuple(
                Part(part["forward_s"].number(), part["backward_s"].number(), part["memory_bytes"].whole())
                for part in document["parts"]
            ),
        )
