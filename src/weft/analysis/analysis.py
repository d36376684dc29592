"""A run with all that is computed of it, each thing once: what rules, tables and pages read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cached_property

from weft.analysis.balance import Suggestion, suggest
from weft.analysis.measured import copies_of, partitions_of, pass_costs
from weft.analysis.messages import Message, arrivals, match, waits
from weft.analysis.parts import Parts, Period, inside, parts
from weft.analysis.pipeline.dependencies import replay_of
from weft.analysis.pipeline.simulated import MOST_TIMES, Simulated, simulated
from weft.analysis.pipeline.work import stages_of
from weft.analysis.replay import Replay
from weft.analysis.run import Facts, Run, Step
from weft.analysis.run_time import RunTime, run_times
from weft.analysis.whatif import WhatIf, what_if
from weft.schedule.table import named
from weft.timeline import Timeline

LEAVE_OUT = 1
"""So many steps at the begin are not typical: they trace, split and allocate."""


PREPARED = 0.02
"""A step of which a larger share went into tracing and arranging memory is not usual."""

SIMPLEST = "1f1b"


class Analysis:
    """The findings of a recorded run, each computed when first read.

    Args:
        run: As it was recorded.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def timeline(self) -> Timeline:
        """The recorded spans."""
        return self.run.timeline

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return self.run.ranks

    @cached_property
    def messages(self) -> list[Message]:
        """Those with both ends, by arrival."""
        return match(self.timeline)

    @cached_property
    def parts(self) -> Mapping[int, Mapping[Period, Parts]]:
        """For each rank, for each of its recorded steps, where the time went."""
        arrived = arrivals(self.messages)
        return {rank: parts(self.timeline, rank, arrived.get(rank, {})) for rank in self.timeline.ranks}

    @cached_property
    def run_times(self) -> Mapping[int, RunTime]:
        """For each rank into what its whole run went."""
        return run_times(self.run)

    @cached_property
    def inside(self) -> Mapping[int, Mapping[int, Mapping[str, float]]]:
        """For each rank and usual step the seconds of each kind of span, up to the end of the step's function."""
        return {rank: inside(self.timeline, rank, self.usual_steps) for rank in self.timeline.ranks}

    @cached_property
    def training_steps(self) -> frozenset[int]:
        """The recorded steps with a backward pass, without the first ones."""
        evaluated = {step.step for steps in self.run.steps.values() for step in steps if step.evaluates}
        began = sorted({span.step for span in self.timeline.spans if span.kind == "step"})
        return frozenset(step for step in (began or self.timeline.steps)[LEAVE_OUT:] if step not in evaluated)

    @cached_property
    def typical(self) -> Mapping[int, Parts]:
        """For each rank the mean parts of its usual steps; a rank that has none is left out.

        A timeline without steps, as simulated ones are, is one usual step.
        """
        usual = self.usual_steps | {-1}
        chosen = {
            rank: [value for period, value in own.items() if period.step in usual]
            for rank, own in self.parts.items()
        }
        return {
            rank: Parts(*map(statistics.fmean, zip(*own, strict=True))) for rank, own in chosen.items() if own
        }

    @cached_property
    def usual_steps(self) -> frozenset[int]:
        """Of the training steps those that took at most one and a half times the median, on every rank.

        The last one is left out where there are others: no next one says where it ended. So are those in which a rank
        still prepared, unless all did.
        """
        taken: dict[int, float] = {}
        prepared: set[int] = set()
        for own in self.parts.values():
            for period, each in own.items():
                if period.step in self.training_steps:
                    taken[period.step] = max(taken.get(period.step, 0.0), period.duration_s)
                    if each.prepare > PREPARED * period.duration_s:
                        prepared.add(period.step)
        if len(prepared) < len(taken):
            taken = {step: seconds for step, seconds in taken.items() if step not in prepared}
        if not taken:
            return frozenset()
        if len(taken) > 1:
            del taken[max(taken)]
        middle = statistics.median(taken.values())
        return frozenset(step for step, seconds in taken.items() if seconds <= 1.5 * middle)

    @cached_property
    def step_s(self) -> float:
        """The mean time from one usual step to the next, over ranks; 0 if there is none."""
        return statistics.fmean(each.total for each in self.typical.values()) if self.typical else 0.0

    @cached_property
    def waits(self) -> Mapping[tuple[int, int], float]:
        """For each pair of ranks how many seconds of a usual step the first waited for the second."""
        if not self.usual_steps:
            return {}
        usual = Timeline(span for span in self.timeline.spans if span.step in self.usual_steps)
        return {pair: seconds / len(self.usual_steps) for pair, seconds in waits(usual).items()}

    @cached_property
    def partitions(self) -> Mapping[int, int]:
        """For each rank its partition."""
        return partitions_of(self.timeline.ranks, self.run.facts)

    @cached_property
    def partition_work(self) -> Mapping[int, float]:
        """For each partition the seconds of F, B, I and W in a usual step; of copies the middle one, of two the faster.

        The others may be slow for reasons of their own.
        """
        found: dict[int, list[float]] = {}
        for rank, each in self.typical.items():
            found.setdefault(self.partitions[rank], []).append(each.work)
        return {partition: statistics.median_low(own) for partition, own in sorted(found.items())}

    @cached_property
    def replay(self) -> Replay:
        """Usual steps that can be run again with other durations: all of them, or a sample."""
        return replay_of(self.timeline, self.parts, self.usual_steps, copies_of(self.partitions))

    @cached_property
    def simulated(self) -> Simulated | None:
        """The pipeline as it can be simulated; one that follows from measures, as 1F1B with as many stages."""
        costs = pass_costs(self.run) if self.setting("measured_costs") is True else {}
        stages = stages_of(self.replay, self.partitions, costs)
        asked = str(self.setting("pipeline", SIMPLEST))
        return simulated(self.replay, stages, self.partitions, asked) or simulated(
            self.replay, stages, self.partitions, SIMPLEST
        )

    @cached_property
    def what_if(self) -> WhatIf:
        """The length of a usual step with one thing changed, for each change that applies."""
        return what_if(self, self.simulated, self.suggestion)

    @cached_property
    def suggestion(self) -> Suggestion | None:
        """The split that balances the partitions as they were measured; nothing if units are not known."""
        return suggest(self, self.simulated)

    def gain_of_microbatches(self, number: int) -> float | None:
        """The share of a step that another number of microbatches saves, simulated; nothing where that is not known."""
        present = self.simulated
        if present is None or not present.explains or not self.replay.faithful:
            return None
        if number > MOST_TIMES * present.stages.microbatches:
            return None
        return present.share(present.now.step_s - present.step(number).step_s, self.replay.step_s)

    def facts(self, rank: int) -> Facts:
        """The facts of a rank; defaults if it recorded none."""
        return self.run.facts.get(rank) or Facts(rank, len(self.ranks))

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank that trained, without the first ones."""
        return tuple(step for step in self.run.steps.get(rank, ()) if not step.evaluates)[LEAVE_OUT:]

    def setting(self, name: str, default: object = None) -> object:
        """A setting of the run; a schedule that was recorded by a former name has its name of today."""
        found = next(
            (facts.settings[name] for facts in self.run.facts.values() if name in facts.settings), default
        )
        return named(found) if name == "pipeline" and isinstance(found, str) else found
