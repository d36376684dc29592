"""A run beside others as tables: an earlier one, or the same job on other numbers of ranks."""

from __future__ import annotations

from weft.analysis.compare import Comparison, Difference
from weft.analysis.scaling import Scaling
from weft.report.run.words import PARTS, Table, milliseconds, number, percent

LEAST = 0.001
"""A share of a step below which a difference is left out."""


def compared(comparison: Comparison) -> list[Table]:
    """By parts, by ranks, and what is set otherwise."""
    step = comparison.step
    rows = [
        _row(PARTS[each.part].name, each, step.old_s)
        for each in comparison.parts
        if _counts(each, step.old_s)
    ]
    old, new = comparison.samples_s
    if old and new:
        rows.append(
            ("samples a second", number(old), number(new), number(new - old), f"{new / old - 1:+.1%}")
        )
    headers = ("part, mean of all ranks", "before ms", "now ms", "difference ms", "of the step")
    tables = [
        Table("A usual step, before and now", headers, [_row("whole step", step, step.old_s), *rows], "<>>>>"),
        _by_rank(comparison),
        Table(
            "Set otherwise", ("setting", "before", "now"),
            [(each.name, _said(each.old), _said(each.new)) for each in comparison.settings], "<<<",
        ),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def _counts(each: Difference, step_s: float) -> bool:
    return max(each.old_s, each.new_s) >= LEAST * step_s


def _row(name: str, each: Difference, step_s: float) -> tuple[str, ...]:
    return (
        name, milliseconds(each.old_s), milliseconds(each.new_s), milliseconds(each.more_s),
        f"{each.more_s / step_s:+.1%}",
    )  # fmt: skip


def _by_rank(comparison: Comparison) -> Table:
    """For each rank the parts that changed most."""
    rows = []
    for rank, parts in comparison.ranks.items():
        most = [
            f"{PARTS[each.part].name} {each.more_s * 1e3:+.2f}"
            for each in parts[:3]
            if abs(each.more_s) >= LEAST * comparison.step.old_s
        ]
        if most:
            rows.append((f"rank {rank}", ", ".join(most)))
    return Table("What changed most on each rank, ms", ("rank", "parts"), rows, "<<")


def _said(value: object) -> str:
    return "not said" if value is None else str(value)


def scaled(scaling: Scaling) -> list[Table]:
    """Throughput and efficiency, and what each lost share went into."""
    rows = [
        (row.name, str(row.ranks), milliseconds(row.step_s), number(row.samples_s), number(row.linear),
         percent(row.efficiency), PARTS[row.largest].name if row.largest else "")
        for row in scaling.rows
    ]  # fmt: skip
    headers = ("run", "ranks", "step ms", "samples a second", "linear", "efficiency", "most is lost to")
    used = [part for part in PARTS if any(abs(row.lost[part]) >= LEAST for row in scaling.rows)]
    lost = [(row.name, *(f"{row.lost[part]:+.1%}" for part in used)) for row in scaling.rows[1:]]
    lost_headers = ("run", *(PARTS[part].name for part in used))
    return [
        Table("Throughput by ranks", headers, rows, "<>>>>><"),
        Table(
            "Shares of the ranks' time that each sample takes more than in the smallest run", lost_headers,
            lost if used else [], "<".ljust(len(lost_headers), ">"),
        ),
    ]  # fmt: skip
