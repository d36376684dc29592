"""`"microbatches": "auto"`: the number whose simulated step takes the least time.

The rank that decides traces microbatches of two sizes. The costs of every other size follow from a line through these
two (see `weft.plan.measured.microbatches`), module by module in the proportions of the nearer one. Each number is then
placed and simulated as if it had been asked for; the plan itself is made afterwards, with the number that was taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.config import Settings
from weft.errors import PlacementError, UsageError
from weft.plan.chosen import Chosen, schedule_for
from weft.plan.measured.microbatches import Judged, Line, explain, judge, numbers, quickest, to_measure
from weft.schedule.table import KINDS
from weft.simulate import Simulation
from weft.torch.model import DistributedModel
from weft.torch.session.device import device_bytes, limit_bytes
from weft.torch.session.session import Session
from weft.torch.split.automatic import expected_step, find_best, links_of, place_units
from weft.torch.split.by_hand import place_by_hand
from weft.torch.split.first_microbatch import trace_step
from weft.torch.split.link_speed import MeasuredLink
from weft.torch.split.memory_room import ROOM, decide_optimize
from weft.torch.split.open_modules import Choice
from weft.torch.split.unit_tree import Tree
from weft.torch.tensors.mini_batch import MiniBatch
from weft.torch.trace.record import Record, Trace

log = logging.getLogger("weft")

LIKE = {
    "forward_s": ("forward_s",),
    "backward_s": ("backward_s", "input_s", "weight_s"),
    "saved_bytes": ("saved_bytes", "largest_bytes"),
    "output_bytes": ("output_bytes",),
}
"""What has a line of its own, and which figures of a record go with it."""


def decide_number(
    session: Session,
    models: Sequence[DistributedModel],
    function: Callable[..., Any],
    batch: MiniBatch,
    link: MeasuredLink,
) -> tuple[int, str]:
    """Into how many microbatches mini-batches like this one are cut, and why; on the rank that decides.

    `batch`: the first one; `link`: what messages between ranks take.

    Raises:
        PlacementError: No number can be placed.
    """
    assert batch.size is not None
    partitions = session.settings.partitions
    tried = numbers(batch.cut.joined.units(batch.size), partitions, batch.cut.uneven)
    if len(tried) == 1:
        return 1, f"microbatches: 1, because a mini-batch of {batch.size} cannot be cut otherwise"
    measured = to_measure(tried, partitions)
    models = [model for model in models if model.resumed_plan is None] or models
    sized = [
        Sized({number: traced(session, model, function, batch, number) for number in measured}, batch.size)
        for model in models
    ]
    limit = limit_bytes(session) or ROOM * device_bytes(session)
    found = [_judge(session, models, sized, number, link, limit) for number in tried]
    best = quickest(found)
    if best is None:
        raise PlacementError(f"no number of microbatches can be placed: {found[0].fault}")
    if best.fault:
        log.warning("no number of microbatches fits the memory (%s): %d runs", best.fault, best.microbatches)
    time = Line(*(sum(getattr(one.time, part) for one in sized) for part in ("fixed", "each")))
    return best.microbatches, explain(best, found, batch.size, time, measured)


def need_cut(batch: MiniBatch) -> None:
    """Refuse a step of which nothing is cut, on every rank."""
    if batch.size is None:
        raise UsageError(
            'microbatches is "auto", but the step is given no tensor that is cut, so that every number would do '
            'something else: write a number, "microbatches": 1, say'
        )


def traced(
    session: Session, model: DistributedModel, function: Callable[..., Any], batch: MiniBatch, number: int
) -> Trace:
    """One of so many microbatches; what their padding means is logged when the plan is made."""
    return trace_step(session, model, function, replace(batch, microbatches=number), counted=True)


@dataclass(frozen=True)
class Sized:
    """Traces of one model by the number of microbatches, of a mini-batch of so many samples."""

    traces: dict[int, Trace]
    samples: int

    def line(self, figure: str) -> Line:
        """A figure of the whole model, by the samples of a microbatch."""
        return Line.through(
            {self.samples // number: _sum(trace, figure) for number, trace in self.traces.items()}
        )

    @property
    def time(self) -> Line:
        """Forward and backward pass, in seconds."""
        one, other = self.line("forward_s"), self.line("backward_s")
        return Line(one.fixed + other.fixed, one.each + other.each)

    def at(self, number: int) -> Trace:
        """The trace of one of so many microbatches, as far as it is known from those that ran."""
        near = min(self.traces, key=lambda known: max(known, number) / min(known, number))
        trace = self.traces[near]
        factors = {}
        for figure in LIKE:
            had, has = _sum(trace, figure), self.line(figure).at(self.samples / number)
            factors[figure] = has / had if had else 0.0
        records = {name: _scaled(record, factors) for name, record in trace.records.items()}
        return replace(trace, records=records, around=_scaled(trace.around, factors))


def _sum(trace: Trace, figure: str) -> float:
    return float(sum(getattr(record, figure) for record in (*trace.records.values(), trace.around)))


def _scaled(record: Record, factors: dict[str, float]) -> Record:
    """The record with each figure as many times as large as its factor says; bytes stay whole."""
    changed: dict[str, Any] = {}
    for figure, same in LIKE.items():
        for name in same:
            value = getattr(record, name)
            changed[name] = type(value)(value * factors[figure])
    return replace(record, **changed)


def _judge(
    session: Session,
    models: Sequence[DistributedModel],
    sized: Sequence[Sized],
    number: int,
    link: MeasuredLink,
    limit: float,
) -> Judged:
    """The verdict on a number of microbatches; models follow each other in a step."""
    settings = decide_optimize(replace(session.settings, microbatches=number), "speed")
    try:
        steps = [
            simulated(settings, model, Tree(model.module, one.at(number)), link, limit_bytes(session))
            for model, one in zip(models, sized, strict=True)
        ]
    except PlacementError as error:
        return Judged(number, fault=str(error))
    peaks = [sum(of_rank) for of_rank in zip(*(step.peak_bytes for step in steps), strict=True)]
    return judge(number, sum(step.step_s for step in steps), peaks, limit)


def simulated(
    settings: Settings, model: DistributedModel, tree: Tree, link: MeasuredLink, memory_bytes: float | None
) -> Simulation:
    """The step with the units where these settings would put them."""
    links = links_of(tree, link)
    if not settings.auto_partition:
        opened, pieces, places = place_by_hand(
            tree, model.module, settings.default_partition, settings.partitions
        )
        choice = Choice(frozenset(opened), pieces, places, places, [], 0.0)
        return expected_step(settings, choice, None, links)
    if KINDS[settings.pipeline].measured:
        best = find_best(tree, settings, links, memory_bytes)
        assert best.placed is not None
        return expected_step(settings, best.placed.placement, Chosen.of(best, links, ""))
    layout = schedule_for(settings, None, settings.microbatch_count).rank_of_stage
    return expected_step(settings, place_units(tree, settings, links, layout).placement, None, links)
