"""The step of a plan with a pipeline, simulated, as lanes: who runs which microbatch when.

Lanes are static: few ranks and few microbatches are drawn, so that the page needs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.plan.parallelism.search import Plan
from weft.plan.parallelism.step import crossing_rounds
from weft.report.picture import tooltip
from weft.report.plan.pictures import LOOKS
from weft.schedule import make
from weft.simulate import Links, Simulation, StageCost, simulate
from weft.timeline import Span
from weft.topology.cluster import Link
from weft.units import format_seconds

MOST_RANKS, MOST_STAGES, MOST_MICROBATCHES = 8, 16, 16
NARROWEST = (0.0, 1.1, 1.7)
"""Per cent of a lane that a number of so many digits needs."""
LOWER, LOWEST = 25.0, 60.0
"""How much lower the boxes of a rank's next stage begin, and the lowest place of all, in per cent of the lane."""


class Box(NamedTuple):
    """A piece of a lane, in per cent of it from the left and from the top."""

    part: str
    start: float
    width: float
    top: float
    label: str
    tooltip: str


class RankLane(NamedTuple):
    """A rank's step."""

    name: str
    boxes: list[Box]
    idle: str


@dataclass(frozen=True)
class Pipeline:
    """A drawn step.

    Attributes:
        note: What is drawn, and what of the plan is not.
        lanes: A rank each.
        parts: The kinds of work that there are.
        sides: Times below: at the left, in the middle, at the right.
        step_s: The simulated step that is drawn.
    """

    note: str
    lanes: list[RankLane]
    parts: list[str]
    sides: tuple[str, ...]
    step_s: float


def pipeline(plan: Plan, costs: Sequence[StageCost]) -> Pipeline | None:
    """The step of a plan; nothing if it has no pipeline.

    Args:
        plan: Whose step.
        costs: What each of its stages takes.
    """
    if plan.division.pipeline == 1:
        return None
    ranks, microbatches = drawn_size(plan)
    one = plan.division
    chunks = one.chunks if one.schedule == "interleaved_1f1b" else None
    made = make(one.schedule, ranks, microbatches, chunks=chunks)
    # The first stages and the last one, which has the head.
    shown = [*costs[: len(made.rank_of_stage) - 1], costs[-1]]
    crossing_s = plan.step.crossings / crossing_rounds(plan.division, plan.step.microbatches)
    step = simulate(
        made.ranks, made.rank_of_stage, shown, Links.uniform(Link(crossing_s)),
        reduce_s=[plan.step.exposed] * ranks, optimizer_s=[plan.step.optimizer] * ranks,
    )  # fmt: skip
    return _drawn(plan, step)


def drawn_size(plan: Plan) -> tuple[int, int]:
    """The ranks and microbatches of a plan that are drawn: all, or as many as can be read.

    >>> from weft.plan.parallelism.job import Division
    >>> from weft.plan.parallelism.traced import NOTHING
    >>> from weft.plan.parallelism.layer import Times
    >>> from weft.plan.parallelism.memory import Memory
    >>> from weft.plan.parallelism.step import Step
    >>> step = Step(NOTHING, Times(1, 1, 1), 640, 0, 0, 0, 0, 0, 0)
    >>> drawn_size(Plan(Division(pipeline=32, chunks=3, schedule="interleaved_1f1b"), step, Memory(0, 0, 0, 0, 0)))
    (5, 15)
    """
    one = plan.division
    ranks = min(one.pipeline, MOST_RANKS, max(2, MOST_STAGES // one.chunks))
    microbatches = min(plan.step.microbatches, MOST_MICROBATCHES)
    if one.schedule == "interleaved_1f1b" and microbatches > ranks:
        microbatches -= microbatches % ranks  # whole rounds
    return ranks, microbatches


def _drawn(plan: Plan, step: Simulation) -> Pipeline:
    spans = [span for span in step.timeline.spans if span.kind in LOOKS]
    lanes = []
    for rank in step.timeline.ranks:
        own = [span for span in spans if span.rank == rank]
        stages = sorted({span.stage for span in own if span.stage >= 0})
        boxes = [_box(span, step.step_s, stages) for span in own]
        lanes.append(RankLane(f"rank {rank}", boxes, f"{step.idle[rank].bubble:.0%}"))
    kinds = {span.kind for span in spans}
    ends = tuple(format_seconds(step.step_s * share) for share in (0.5, 1.0))
    return Pipeline(
        _note(plan, step), lanes, [kind for kind in LOOKS if kind in kinds], ("0", *ends), step.step_s
    )


def _box(span: Span, step_s: float, stages: list[int]) -> Box:
    lower = LOWER * stages.index(span.stage) if span.stage >= 0 else 0.0
    width = span.duration_s / step_s * 100
    label = str(span.microbatch) if span.microbatch >= 0 else ""
    return Box(
        span.kind, round(span.start_s / step_s * 100, 3), round(width, 3), min(lower, LOWEST),
        label if width >= NARROWEST[min(len(label), 2)] else "", tooltip(span),
    )  # fmt: skip


def _note(plan: Plan, step: Simulation) -> str:
    """The note on what is drawn, and what of the plan is not."""
    one, microbatches = plan.division, plan.step.microbatches
    ranks, drawn = drawn_size(plan)
    stages = f", {one.chunks} stages each" if one.chunks > 1 else ""
    words = (
        f"Schedule {one.schedule}, {one.pipeline} ranks in a row{stages}, {microbatches} microbatches: the bubble is "
        f"{plan.step.bubble / plan.seconds:.1%} of the step. "
    )
    cut = [
        f"{few} of {many} {what}"
        for few, many, what in ((ranks, one.pipeline, "ranks"), (drawn, microbatches, "microbatches"))
        if few < many
    ]
    if not cut:
        return words + f"Drawn is the whole step; simulated it takes {format_seconds(step.step_s)}."
    return words + (
        f"Drawn are {' and '.join(cut)}, as a step of their own: its order is that of the plan, its shares of "
        "idle time are larger."
    )
