"""The step as it could be: the same schedule and work, shared out equally, with transfers that take no time."""

from __future__ import annotations

import statistics

from weft.analysis.analysis import Analysis
from weft.errors import WeftError
from weft.schedule import NAMES, make
from weft.simulate import Simulation, StageCost, simulate
from weft.timeline import Span, Timeline
from weft.untrusted import MOST_ACTIONS


def ideal_step(analysis: Analysis) -> Timeline | None:
    """One step of all copies, from time 0; nothing where the schedule or the work is not known.

    >>> from weft.analysis.run import Run
    >>> ideal_step(Analysis(Run("nothing", Timeline()))) is None
    True
    """
    name, partitions, microbatches = (
        analysis.setting(each) for each in ("pipeline", "partitions", "microbatches")
    )
    if not isinstance(partitions, int) or not isinstance(microbatches, int) or name not in NAMES:
        return None
    there = {analysis.facts(rank).pp_rank for rank in analysis.typical}
    if (
        not there
        or not 2 <= partitions == len(there) == max(there) + 1
        or microbatches * partitions > MOST_ACTIONS
    ):
        return None
    try:
        made = make(str(name), ranks=partitions, microbatches=microbatches)
        step = simulate(
            made.ranks, made.rank_of_stage, _equal_costs(analysis, len(made.rank_of_stage), microbatches)
        )
    except WeftError:
        return None  # the schedule needs what is not recorded
    return _of_all_copies(analysis, step)


def _equal_costs(analysis: Analysis, stages: int, microbatches: int) -> list[StageCost]:
    """Every stage takes the same: the mean over ranks, whether backward passes were split or not."""
    partitions = len({analysis.facts(rank).pp_rank for rank in analysis.typical})
    each = stages / partitions * microbatches

    def mean(*names: str) -> float:
        return (
            statistics.fmean(
                sum(getattr(parts, name) for name in names) for parts in analysis.typical.values()
            )
            / each
        )

    inputs, weights = mean("backward_inputs"), mean("backward_weights")
    backward = mean("backward", "backward_inputs", "backward_weights")
    halves = (inputs, weights) if inputs else (backward / 2, backward / 2)
    return [StageCost(mean("forward"), backward, *halves)] * stages


def _of_all_copies(analysis: Analysis, step: Simulation) -> Timeline:
    """The simulated partitions' spans, for each rank that has that partition."""
    spans = []
    for rank in analysis.typical:
        partition = analysis.facts(rank).pp_rank
        if partition in step.timeline.ranks:
            spans += [
                Span(rank, span.kind, span.microbatch, span.start_s, span.end_s, span.stage)
                for span in step.timeline.of_rank(partition)
            ]
    return Timeline(spans)
