"""A run beside others as tables: an earlier one, the same job on other numbers of ranks, or its plan."""

from __future__ import annotations

from collections.abc import Sequence

from weft.analysis.compare import Comparison, Difference
from weft.analysis.plan.comparison import LARGE_BYTES, BesidePlan
from weft.analysis.scaling import Scaling
from weft.report.run.labels import MOST_RANKS, PARTS, Table, milliseconds, number, percent
from weft.units import format_bytes

LEAST = 0.001
"""A share of a step below which a difference is left out."""


def compared(comparison: Comparison) -> list[Table]:
    """By parts, by ranks, and what is set otherwise."""
    step = comparison.step
    rows = [
        _row(PARTS[each.part].name, each, step.old_s)
        for each in comparison.parts
        if max(each.old_s, each.new_s) >= LEAST * step.old_s
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


def planned(beside: BesidePlan) -> list[Table]:
    """The step, what each partition does in it, and memory: as planned, and as they were."""
    headers = ("what", "planned ms", "measured ms", "difference ms", "of the planned step")
    rows = [
        (
            one.where, milliseconds(one.planned), milliseconds(one.measured), milliseconds(one.more),
            f"{one.more / beside.step.planned:+.1%}" if beside.step.planned else "",
        )
        for one in (beside.step, *beside.terms)
    ]  # fmt: skip
    memory = [
        (one.where, format_bytes(one.planned), format_bytes(one.measured),
         f"{one.more / one.planned:+.1%}" if one.planned > LARGE_BYTES else "")
        for one in beside.memory
    ]  # fmt: skip
    tables = [
        Table(f"A usual step beside {beside.source}", headers, _first(rows), "<>>>>"),
        Table(
            f"Memory, {beside.counted}", ("what", "planned", "measured", "difference"),
            _first(memory), "<>>>",
        ),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def _first(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """As many rows as a table shows."""
    return rows[: 3 * MOST_RANKS]


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
