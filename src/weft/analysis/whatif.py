"""The time of a usual step with one thing changed, and what to write for that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from weft.analysis.balance import Suggestion
from weft.analysis.measured import Measured, pass_costs, units_of
from weft.analysis.pipeline.simulated import Other, Simulated, best_number, best_schedule, saved_by_work
from weft.analysis.pipeline.work import at_peers_speed
from weft.analysis.replay import HOST, SAME_S, Replay
from weft.timeline import WORK

SLOW = 0.95
"""A rank counts as a straggler where its work would take less than this share of its time at its peers' speed."""


@dataclass(frozen=True)
class Change:
    """One thing that could be otherwise.

    Attributes:
        name: See `docs/report.md`.
        text: What is changed.
        line: What to write for it; empty where no single line does it.
        step_s: What a step would take.
        gain: The share of a step that is saved; nothing where the replay is not faithful enough to say.
        ranks: Those that it is about, if not all.
        microbatches: The number that it is about; 0 if it is about something else.
    """

    name: str
    text: str
    line: str
    step_s: float
    gain: float | None
    ranks: tuple[int, ...] = ()
    microbatches: int = 0


@dataclass(frozen=True)
class WhatIf:
    """The gains of the changes that apply.

    Attributes:
        fidelity: By which share of a step the replay without a change differs from the recording; nan if there is none.
        step_s: The recorded step.
        changes: Those that apply to the run.
    """

    fidelity: float
    step_s: float
    changes: tuple[Change, ...] = field(default=())

    def change(self, name: str) -> Change | None:
        """The change of that name, if it applies."""
        return next((change for change in self.changes if change.name == name), None)

    def gain(self, name: str) -> float | None:
        """The gain of the change of that name; None if it does not apply or is not known."""
        found = self.change(name)
        return None if found is None else found.gain


def what_if(analysis: Measured, present: Simulated | None, suggestion: Suggestion | None) -> WhatIf:
    """All changes that apply to a run, replayed or simulated.

    Args:
        analysis: What was recorded.
        present: The same as it can be simulated, if it can.
        suggestion: The best split, if units are known.
    """
    replay = analysis.replay
    if not replay.nodes or not replay.measured_s:
        return WhatIf(math.nan, analysis.step_s)
    trial = _Trial(analysis, replay, present, suggestion)
    return WhatIf(replay.fidelity, analysis.step_s, tuple(trial.changes()))


@dataclass(frozen=True)
class _Trial:
    analysis: Measured
    replay: Replay
    present: Simulated | None
    suggestion: Suggestion | None

    def changes(self) -> Iterator[Change]:
        yield from self._equal_partitions()
        yield from self._split()
        yield from self._transfers()
        yield from self._otherwise()
        yield from self._straggler()
        for name, text, line, kinds in LEFT_OUT:
            if any(node.kind in kinds and node.end_s > node.start_s + SAME_S for node in self.replay.nodes):
                yield self._replayed(name, text, line, self.replay.without(kinds))

    def _change(self, name: str, text: str, line: str, gain: float, ranks: tuple[int, ...] = ()) -> Change:
        """A step that takes so much less."""
        step_s = self.analysis.step_s * (1.0 - gain)
        return Change(name, text, line, step_s, gain if self.replay.faithful else None, ranks)

    def _replayed(
        self, name: str, text: str, line: str, replay: Replay, ranks: tuple[int, ...] = ()
    ) -> Change:
        return self._change(name, text, line, 1.0 - replay.step_s / self.replay.step_s, ranks)

    def _equal_partitions(self) -> Iterator[Change]:
        work_s = self.analysis.partition_work
        if len(work_s) < 2 or not min(work_s.values()):
            return
        mean_s = statistics.fmean(work_s.values())
        factors = {partition: mean_s / own for partition, own in work_s.items()}
        saved = saved_by_work(self.replay, self.analysis.partitions, factors, self.present)
        yield self._change("equal partitions", "every partition has the mean of their work", "", saved)

    def _split(self) -> Iterator[Change]:
        """The best split that there is: what equal partitions promise only units of any size can keep."""
        if self.suggestion is None or not self.suggestion.moves:
            return
        line = ""
        if self.analysis.setting("auto_partition", True) is False:
            line = '"auto_partition": True'
        elif self.analysis.setting("optimize") == "memory":
            line = '"optimize": "speed"'
        text = f"moved: {self.suggestion.text}"
        yield Change("split", text, line, self.suggestion.step_s, self.suggestion.gain)

    def _transfers(self) -> Iterator[Change]:
        if any(need.transfer_s for needs in self.replay.needs for need in needs):
            text = "messages are there when they are sent"
            yield self._replayed("no transfers", text, "", self.replay.without_transfers())

    def _straggler(self) -> Iterator[Change]:
        partitions = self.analysis.partitions
        expected = {partition: sum(costs) for partition, costs in pass_costs(self.analysis.run).items()}
        factors = at_peers_speed(self.replay, partitions, expected)
        slow = {rank: [factor for (own, _), factor in factors.items() if own == rank] for rank in partitions}
        means = {rank: statistics.fmean(own) for rank, own in slow.items() if own}
        ranks = tuple(rank for rank, mean in means.items() if mean < SLOW)
        if not ranks or len(ranks) == len(partitions):
            return  # where all vary alike, none is slower than its peers
        changed = self.replay.scaled(
            lambda node: factors[node.rank, node.step] if node.kind in WORK and node.rank in ranks else 1.0
        )
        who = f"rank {ranks[0]} works" if len(ranks) == 1 else f"the ranks {', '.join(map(str, ranks))} work"
        if len(set(partitions.values())) < len(partitions):
            speed = "at the speed of the other copies"
        elif any(
            statistics.median_high(slow[rank]) < 1.0 for rank in ranks
        ):  # slower than itself in few steps only
            speed = "as fast as other ranks run their units"
        else:
            speed = "in all steps as fast as in most"
        yield self._replayed("straggler", f"{who} {speed}", "", changed, ranks)

    def _otherwise(self) -> Iterator[Change]:
        """Other numbers of microbatches, and other schedules."""
        present = self.present
        if present is None:
            return
        samples = [step.samples for step in self.analysis.steps(self.analysis.timeline.ranks[0])]
        found = best_number(present, round(statistics.median(samples)) if samples else 0)
        if found is not None:
            text = f"{found.microbatches} microbatches instead of {present.stages.microbatches}"
            line = _setting("microbatches", found.microbatches)
            change = self._simulated("microbatches", text, line, present, found)
            yield replace(change, microbatches=found.microbatches)
        if present.schedule != self.analysis.setting("pipeline", present.schedule):
            return  # what ran follows from measures
        found = best_schedule(present, len(units_of(self.analysis.run)))
        if found is not None:
            text = f'the schedule "{found.schedule}" instead of "{present.schedule}"'
            yield self._simulated("schedule", text, _setting("pipeline", found.schedule), present, found)

    def _simulated(self, name: str, text: str, line: str, present: Simulated, other: Other) -> Change:
        if other.held > other.held_now:
            text += f", which keeps up to {other.held} microbatches on a rank instead of {other.held_now}"
        found = self._change(name, text, line, present.share(other.saved_s, self.replay.step_s))
        return found if present.explains else replace(found, gain=None)


def _setting(name: str, value: int | str) -> str:
    return f'"{name}": {value}' if isinstance(value, int) else f'"{name}": "{value}"'


LEFT_OUT: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("no data wait", "the next batch is there when it is asked for", "num_workers=4", ("data",)),
    ("no reduce", "sums of gradients take no time; copies still wait for the slowest", "", ("reduce",)),
    ("no host gaps", "Python between the pieces of work takes no time", "", HOST),
    ("no collector", "Python's garbage collector does not run in steps", "gc.freeze()", ("collector",)),
    ("no checkpoint", "nothing waits for checkpoints", "", ("checkpoint",)),
)
"""What is left out altogether: name, text, line, kinds of pieces."""
