"""The settings to try on a real script, in which order, and which of them was best.

    the script's own settings        what all others are held against
    microbatches                     twice as many, and so on, for as long as it gains; else half as many
    every other choice               each value, with the best so far
    degrees of tensor parallelism    the next larger, and so on, for as long as it gains; else the next smaller
    microbatches once more           if another choice was better
    the best and the script's own    in turn, since machines vary

Each gain is of one run against another, so what is not `GAIN` better does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GAIN = 0.02
"""By so much a trial must be faster than the best before it."""
HOPELESS = 0.7
"""A trial with less than this share of the best one's rate may end early."""
MOST_MICROBATCHES = 4096
SCHEDULES = ("auto", "zb_h1", "zbv")
"""Are tried where there is a pipeline."""
DEGREE = "tensor_parallel_degree"

Changes = Mapping[str, Any]
"""Settings by name, or arguments of the script that begin with a dash; those that differ from the script's own."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        samples_per_s: Of all ranks together; None if it failed.
        steps: Usual steps that were measured.
        step_s: How long one took, with all that lies between it and the next.
        memory_bytes: The most that a rank needed.
        failure: Why there is no rate.
        stopped: It was far behind, and ended early.
        settings: All that the job ran with.
        degrees: Over how many ranks weights can be split so that a step has the same samples; none if over no others.
        remark: What else is to be said of it.
    """

    samples_per_s: float | None = None
    steps: int = 0
    step_s: float = 0.0
    memory_bytes: int = 0
    failure: str = ""
    stopped: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    degrees: tuple[int, ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class Trial:
    """Changes that were tried, and what came of it."""

    changes: Changes
    outcome: Outcome

    @property
    def rate(self) -> float:
        """Samples a second; 0 if it failed."""
        return self.outcome.samples_per_s or 0.0


@dataclass
class Tuning:
    """All that was tried so far.

    Attributes:
        trials: In their order; the first one is the script's own.
        repeats: Rates of the best and of the script's own, from running them in turn.
    """

    trials: list[Trial] = field(default_factory=list)
    repeats: list[tuple[float, float]] = field(default_factory=list)

    @property
    def own(self) -> Trial:
        """The script as it is."""
        return self.trials[0]

    @property
    def fastest(self) -> Trial:
        """The one with the highest rate; of equal ones the earliest."""
        return max(self.trials, key=lambda trial: trial.rate)

    @property
    def best(self) -> Trial:
        """The fastest, if it was faster when it ran in turn with the script's own; else the script's own."""
        return self.fastest if self.gain > GAIN or not self.own.rate else self.own

    @property
    def gain(self) -> float:
        """By what share the fastest is faster than the script's own: the median over the turns."""
        if self.fastest is self.own or not self.own.rate:
            return 0.0
        turns = self.repeats or [(self.fastest.rate, self.own.rate)]
        return statistics.median(best / own - 1 if own else 0.0 for best, own in turns)


Run = Callable[[Changes, float], Outcome]
"""Runs the script with changes; the number is the rate below which it need not go on."""


def tune(
    run: Run, choices: Mapping[str, Sequence[Any]], turns: int = 2, found: Tuning | None = None
) -> Iterator[Tuning]:
    """Try one thing after the other; what is known so far after each.

    Args:
        run: Runs one trial.
        choices: What to try beside numbers of microbatches, by name; for `microbatches` those numbers instead.
        turns: How often the best and the script's own run in turn at the end.
        found: Is filled; who stops early has it.
    """
    found = Tuning() if found is None else found
    seen: dict[tuple[tuple[str, str], ...], Trial] = {}

    def attempt(changes: Changes) -> Trial:
        if found.trials:
            own = found.own.outcome.settings
            changes = {
                name: value for name, value in changes.items() if name not in own or value != own[name]
            }
        key = tuple(sorted((name, repr(value)) for name, value in changes.items()))
        if key not in seen:
            floor = HOPELESS * max((trial.rate for trial in found.trials), default=0.0)
            seen[key] = Trial(changes, run(changes, floor))
            found.trials.append(seen[key])
        return seen[key]

    best = attempt({})
    yield found
    partitions = best.outcome.settings.get("partitions", 1)
    if type(partitions) is int and partitions > 1:
        choices = {"pipeline": SCHEDULES, **choices}
    named = [name for name in choices if name not in ("microbatches", DEGREE)]
    for name in ["microbatches", *named, DEGREE, "microbatches"]:
        for way in _ways(name, choices, best.outcome):
            before = best
            for changes in way:
                trial = attempt({**best.changes, **changes})
                yield found
                if trial.rate <= best.rate * (1 + GAIN):
                    break
                best = trial
            if name not in choices and best is not before:
                break  # what gained upwards does not gain downwards
    if found.fastest is not found.own and found.own.rate:
        for _ in range(turns):
            again = [run(trial.changes, 0.0).samples_per_s or 0.0 for trial in (found.own, found.fastest)]
            found.repeats.append((again[1], again[0]))
            yield found


def _ways(name: str, choices: Mapping[str, Sequence[Any]], present: Outcome) -> list[Iterator[Changes]]:
    """Ways to go on from what is: who takes one ends it where it no longer gains."""
    own = present.settings.get(name)
    if name in choices:
        return [iter([{name: value}]) for value in choices[name] if value != own]
    if name == DEGREE and own in present.degrees:
        degrees = sorted(present.degrees)
        at = degrees.index(own)
        found = [degrees[at + 1 :], degrees[:at][::-1]]
        return [({name: degree, "inputs": "per_rank"} for degree in way) for way in found]
    if name == "microbatches" and type(own) is int:
        return [({name: number} for number in way) for way in _climb(own)]
    return []


def _climb(own: int) -> list[Iterator[int]]:
    """Twice as many and so on, then half as many and so on; who takes them ends a way where it no longer gains.

    >>> [list(way) for way in _climb(1024)][0]
    [2048, 4096]
    """

    def ups() -> Iterator[int]:
        value = own * 2
        while value <= MOST_MICROBATCHES:
            yield value
            value *= 2

    def downs() -> Iterator[int]:
        value = own // 2
        while value >= 1:
            yield value
            value //= 2

    return [ups(), downs()]
