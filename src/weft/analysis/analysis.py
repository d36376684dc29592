"""A run with all that is computed of it, each thing once: what rules, tables and pages read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cached_property

from weft.analysis.messages import Message, match, waits
from weft.analysis.parts import Parts, Period, parts
from weft.analysis.run import Facts, Run, Step
from weft.timeline import Timeline

LEAVE_OUT = 1
"""So many steps at the begin are not typical: they trace, split and allocate."""


class Analysis:
    """What a run says.

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
        return {rank: parts(self.timeline, rank, self.messages) for rank in self.timeline.ranks}

    @cached_property
    def training_steps(self) -> frozenset[int]:
        """The recorded steps with a backward pass, without the first ones."""
        evaluated = {step.step for steps in self.run.steps.values() for step in steps if step.evaluates}
        return frozenset(step for step in self.timeline.steps[LEAVE_OUT:] if step not in evaluated)

    @cached_property
    def typical(self) -> Mapping[int, Parts]:
        """For each rank the mean parts of its training steps; outliers are left out by `usual_steps`."""
        found = {}
        for rank, own in self.parts.items():
            chosen = [value for period, value in own.items() if period.step in self.usual_steps]
            chosen = chosen or list(own.values())
            found[rank] = Parts(*(statistics.fmean(column) for column in zip(*chosen, strict=True)))
        return found

    @cached_property
    def usual_steps(self) -> frozenset[int]:
        """Of the training steps those that took at most one and a half times the median, on every rank."""
        taken: dict[int, float] = {}
        for own in self.parts.values():
            for period in own:
                if period.step in self.training_steps:
                    taken[period.step] = max(taken.get(period.step, 0.0), period.duration_s)
        if not taken:
            return frozenset()
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

    def facts(self, rank: int) -> Facts:
        """What a rank is; the least if it never said."""
        return self.run.facts.get(rank) or Facts(rank, len(self.ranks))

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank that trained, without the first ones."""
        return tuple(step for step in self.run.steps.get(rank, ()) if not step.evaluates)[LEAVE_OUT:]

    def setting(self, name: str, default: object = None) -> object:
        """A setting of the run."""
        return next(
            (facts.settings[name] for facts in self.run.facts.values() if name in facts.settings), default
        )
