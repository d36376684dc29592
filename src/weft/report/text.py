"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.errors import UsageError
from weft.units import format_bytes
from weft.visible import visible


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """Rows under headers, in columns.

    Args:
        headers: One for each column.
        rows: What to show; each cell as `str` shows it, what cannot be seen written out.
        align: For each column `<` (left) or `>` (right); left where it says nothing.

    >>> print(table(["unit", "ms"], [["embedding", 0.5], ["head", 12.25]], "<>"))
    unit          ms
    ---------  -----
    embedding    0.5
    head       12.25
    """
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    for number, row in enumerate(cells):
        if len(row) != len(headers):
            raise UsageError(
                f"row {number} has {len(row)} cells, the table has {len(headers)} columns: {row}"
            )
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    sides = align.ljust(len(headers), "<")
    lines = [headers, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)
        ).rstrip()
        for line in lines
    )


class PlacementRow(NamedTuple):
    """One unit of a placement."""

    unit: str
    partition: int
    parameters: int
    bytes: int
    forward_ms: float
    backward_ms: float
    share: float
    """Of the whole model's cost, from 0 to 1."""


def placement_table(rows: Iterable[PlacementRow]) -> str:
    """What lies where, with a line for each partition's sum below.

    >>> rows = [PlacementRow("embedding", 0, 1000, 4096, 0.1, 0.2, 0.25),
    ...         PlacementRow("head", 1, 2000, 8192, 1.0, 2.0, 0.75)]
    >>> print(placement_table(rows))
    unit          partition  parameters  bytes  forward ms  backward ms  share
    ------------  ---------  ----------  -----  ----------  -----------  -----
    embedding             0       1,000  4 KiB        0.10         0.20  25.0%
    head                  1       2,000  8 KiB        1.00         2.00  75.0%
    <BLANKLINE>
    all (1 unit)          0       1,000  4 KiB        0.10         0.20  25.0%
    all (1 unit)          1       2,000  8 KiB        1.00         2.00  75.0%
    """
    rows = [PlacementRow(*row) for row in rows]
    sums = [
        _sum([row for row in rows if row.partition == partition])
        for partition in sorted({row.partition for row in rows})
    ]
    headers = ("unit", "partition", "parameters", "bytes", "forward ms", "backward ms", "share")
    lines = table(headers, map(_cells, [*rows, *sums]), "<>>>>>>").splitlines()
    return "\n".join([*lines[: 2 + len(rows)], "", *lines[2 + len(rows) :]])


def _sum(rows: Sequence[PlacementRow]) -> PlacementRow:
    return PlacementRow(
        f"all ({len(rows)} unit{'s' if len(rows) != 1 else ''})",
        rows[0].partition,
        sum(row.parameters for row in rows),
        sum(row.bytes for row in rows),
        sum(row.forward_ms for row in rows),
        sum(row.backward_ms for row in rows),
        sum(row.share for row in rows),
    )


def _cells(row: PlacementRow) -> tuple[str, ...]:
    return (
        row.unit,
        str(row.partition),
        f"{row.parameters:,}",
        format_bytes(row.bytes),
        f"{row.forward_ms:.2f}",
        f"{row.backward_ms:.2f}",
        f"{row.share:.1%}",
    )
