"""The content of a plan's page, as one value: of a job by its sizes, or of a traced model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.plan.parallelism.search import Found, Plan
from weft.report.plan.pipeline import Pipeline
from weft.report.run.labels import Table


@dataclass(frozen=True)
class ToWrite:
    """The lines that start a plan.

    Attributes:
        head: What of it weft runs.
        command: For a shell.
        settings: Of `weft.init`.
        batch: What a replica takes in a step.
    """

    head: str
    command: str
    settings: dict[str, object]
    batch: str


@dataclass(frozen=True)
class PlanReport:
    """A question with its answer.

    Attributes:
        question: What is trained, where; several lines.
        answer: The recommendation in a sentence, or why there is none.
        found: The divisions.
        limit_bytes: What of a device may be used.
        write: How to start the best plan that weft runs; None if there is none.
        best: The fastest divisions, in the order of `found.best`.
        of_kind: The fastest of each kind.
        guide: What to try, in order.
        storage: What the storage must give, and which file systems and services do; None if nobody asked.
        others: Why others fell out, a line each.
        terms: The terms of the best one's step and memory.
        pipeline: The best one's step, if it has a pipeline.
        assumptions: What is taken for granted, a line each.
        how_right: How far the figures can be trusted, a line each.
        machine: The machine's figures.
    """

    question: str
    answer: str
    found: Found
    limit_bytes: float
    write: ToWrite | None
    best: Table
    of_kind: Table
    guide: Table | None = None
    storage: tuple[str, Sequence[Table]] | None = None
    others: Sequence[str] = ()
    terms: Sequence[Table] = ()
    pipeline: Pipeline | None = None
    assumptions: Sequence[str] = ()
    how_right: Sequence[str] = ()
    machine: Table = field(default=Table("", (), ()))

    @property
    def kinds(self) -> list[Plan]:
        """The fastest plan of each kind, the fastest first."""
        return sorted(self.found.of_kind.values(), key=lambda plan: plan.seconds)
