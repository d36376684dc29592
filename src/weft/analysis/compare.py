"""The parts of a step that became faster or slower between two runs, and where that began."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weft.analysis.analysis import Analysis
from weft.analysis.measured import samples_of
from weft.analysis.parts import Parts
from weft.errors import UsageError
from weft.units import format_seconds

CONSEQUENCES = ("warmup", "steady", "drain")
"""Parts that follow from what other ranks do."""
OWN_SHARE = 0.5
"""What one rank does longer is the cause where it explains so much of what a step takes longer."""
ALIKE = 0.02
"""Steps that differ by less than this share take the same time."""


class Difference(NamedTuple):
    """Seconds of a usual step in the old and the new run."""

    part: str
    old_s: float
    new_s: float

    @property
    def more_s(self) -> float:
        """The seconds that the new run takes longer; negative if it takes less."""
        return self.new_s - self.old_s


class Setting(NamedTuple):
    """A setting or version that differs between the runs; None where a run did not say."""

    name: str
    old: object
    new: object


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        step: A usual step.
        samples_s: Samples a second, old and new; 0 where that is not known.
        parts: The mean over ranks, what changed most first. The differences add up to that of the step.
        ranks: The same for each rank that is in both runs.
        cause: What changed first, as far as parts show it: what a rank does itself where that explains half of the
            difference, else the part that changed most. Nothing if steps take the same time.
        rank: The rank that the cause is on; nothing if it is on all.
        settings: What is set otherwise.
    """

    step: Difference
    samples_s: tuple[float, float]
    parts: tuple[Difference, ...]
    ranks: Mapping[int, tuple[Difference, ...]]
    cause: Difference | None
    rank: int | None
    settings: tuple[Setting, ...]

    @property
    def change(self) -> float:
        """The growth of a step's time, as a share of the old one; negative if it is faster."""
        return self.step.more_s / self.step.old_s

    @property
    def text(self) -> str:
        """One sentence, and what is set otherwise."""
        old, new = format_seconds(self.step.old_s), format_seconds(self.step.new_s)
        if self.cause is None:
            text = f"A step takes as long as before: {new} after {old}."
        else:
            word = "longer" if self.change > 0.0 else "less"
            where = f" on rank {self.rank}" if self.rank is not None else ""
            text = (
                f"A step takes {new} instead of {old}, {abs(self.change):.1%} {word}, most of all by {self.cause.part}"
                f"{where}: {format_seconds(self.cause.new_s)} instead of {format_seconds(self.cause.old_s)}."
            )
        if self.settings:
            settings = ", ".join(f"{each.name} {each.new} instead of {each.old}" for each in self.settings)
            text += f" Set otherwise: {settings}."
        return text


def compare(old: Analysis, new: Analysis) -> Comparison:
    """The parts of a step that became faster or slower from one run to the other.

    Raises:
        UsageError: If one of them has no usual step.
    """
    for analysis in (old, new):
        if not analysis.step_s:
            raise UsageError(
                f'the run "{analysis.run.name}" has no usual step that could be compared: record more than the first '
                "steps, which trace and split the model"
            )
    step = Difference("step", old.step_s, new.step_s)
    parts = _differences(_mean(old), _mean(new))
    ranks = {
        rank: _differences(old.typical[rank], new.typical[rank])
        for rank in old.typical
        if rank in new.typical
    }
    cause, rank = _cause(step, parts, ranks)
    return Comparison(
        step, (samples_of(old) / old.step_s, samples_of(new) / new.step_s), parts, ranks, cause, rank,
        _settings(old, new),
    )  # fmt: skip


def _mean(analysis: Analysis) -> Parts:
    return Parts(*map(statistics.fmean, zip(*analysis.typical.values(), strict=True)))


def _differences(old: Parts, new: Parts) -> tuple[Difference, ...]:
    found = map(Difference, Parts._fields, old, new)
    return tuple(sorted(found, key=lambda each: -abs(each.more_s)))


def _cause(
    step: Difference, parts: tuple[Difference, ...], ranks: Mapping[int, tuple[Difference, ...]]
) -> tuple[Difference | None, int | None]:
    if abs(step.more_s) < ALIKE * step.old_s:
        return None, None
    sign = 1.0 if step.more_s > 0.0 else -1.0
    own = [
        (sign * each.more_s, rank, each)
        for rank, found in ranks.items()
        for each in found
        if each.part not in CONSEQUENCES
    ]
    most = max(own, key=lambda one: one[0], default=(0.0, 0, step))
    mean = {each.part: sign * each.more_s for each in parts}
    if most[0] >= OWN_SHARE * sign * step.more_s:
        everywhere = mean[most[2].part] >= (1.0 - ALIKE) * most[0]
        return most[2], None if everywhere else most[1]
    return max(parts, key=lambda each: sign * each.more_s), None


def _settings(old: Analysis, new: Analysis) -> tuple[Setting, ...]:
    before, after = _set(old), _set(new)
    return tuple(
        Setting(name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    )


def _set(analysis: Analysis) -> dict[str, object]:
    """Settings, versions and the number of ranks."""
    found: dict[str, object] = {"ranks": len(analysis.ranks)}
    for facts in analysis.run.facts.values():
        found |= {**facts.versions, **facts.settings}
    return {name: value for name, value in found.items() if name not in ("record", "log_dir")}
