"""From the steps that were measured to the figures of a table: medians of the kept steps, ratios, their errors."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from statistics import median, stdev

from benchmarks.turns.samples import Record

GRADIENT_TOLERANCE = 1e-5
MIB = 1 << 20


def figures(record: Record, yardstick: Record) -> dict[str, object]:
    wall_s, cpu_s = (median(seconds(record, name)) for name in ("wall_s", "cpu_s"))
    step_ratio, error = ratio(record, yardstick)
    turns_ratio, turns_error = by_turns(record, yardstick)
    return {
        "contender": record.name,
        "step_ms": wall_s * 1e3,
        "step_ratio": step_ratio,
        "step_ratio_error": error,
        "turns_ratio": turns_ratio,
        "turns_ratio_error": turns_error,
        "cpu_ms": cpu_s * 1e3,
        "cpu_ratio": cpu_s / median(seconds(yardstick, "cpu_s")),
        "memory_mib": [rank.above_model_bytes / MIB for rank in record.memory],
        "parameters_mib": [rank.parameter_bytes / MIB for rank in record.memory],
        "first_step_ms": record.first.wall_s * 1e3,
        "first_step_quiet": record.first.quiet,
        "gradient_difference": record.gradient_difference,
        "kept": len(record.kept()),
        "steps": len(record.steps),
    }


def seconds(record: Record, field: str = "wall_s") -> list[float]:
    """That field of the steps that count; of all steps where none does (the table then says that 0 were kept)."""
    return [getattr(step, field) for step in record.kept() or record.steps]


def by_turns(record: Record, base: Record, draws: int = 400) -> tuple[float, float]:
    """The median of the ratios of steps of the same turn, and its standard error (bootstrap).

    Between two such steps the machine's speed hardly changes, so all count in which no other process was busy.
    """
    chance = random.Random(0)
    pairs = list(zip(record.steps, base.steps, strict=False))
    quiet = [(mine, theirs) for mine, theirs in pairs if mine.quiet and theirs.quiet] or pairs
    ratios = [mine.wall_s / theirs.wall_s for mine, theirs in quiet]
    return median(ratios), stdev(median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))


def ratio(record: Record, base: Record, draws: int = 400) -> tuple[float, float]:
    """The ratio of two median step times, and its standard error.

    The error is by bootstrap: both samples drawn anew, many times.
    """
    chance = random.Random(0)
    found, expected = seconds(record), seconds(base)
    drawn = [
        median(chance.choices(found, k=len(found))) / median(chance.choices(expected, k=len(expected)))
        for _ in range(draws)
    ]
    return median(found) / median(expected), stdev(drawn)


def shown(line: dict, name: str) -> str:
    """A ratio of a line, with its error."""
    return f"{line[name]:.3f} ± {line[name + '_error']:.3f}"


def wrong_gradients(rows: Iterable[dict]) -> bool:
    """Whether a contender computed other gradients than one process; says which."""
    wrong = [row for row in rows if not row["gradient_difference"] <= GRADIENT_TOLERANCE]
    for row in wrong:
        print(f"{row['contender']}: gradients differ by {row['gradient_difference']:.1e}", file=sys.stderr)
    return bool(wrong)
