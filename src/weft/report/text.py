"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.errors import UsageError
from weft.terminal_text import visible
from weft.units import format_bytes


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
    memory_bytes: int = 0
    """With gradients, optimizer states and activations."""


def placement_table(rows: Iterable[PlacementRow]) -> str:
    """The units of each partition, with each one's share of the time.

    >>> rows = [PlacementRow("head", 1, 2000, 8192, 1.0, 2.0), PlacementRow("embedding", 0, 1000, 4096, 0.4, 0.6)]
    >>> print(placement_table(rows))
    unit       partition  parameters  bytes  forward ms  backward ms   time
    ---------  ---------  ----------  -----  ----------  -----------  -----
    embedding          0       1,000  4 KiB        0.40         0.60  25.0%
    head               1       2,000  8 KiB        1.00         2.00  75.0%
    """
    rows = sorted((PlacementRow(*row) for row in rows), key=lambda row: row.partition)
    total_ms = sum(row.forward_ms + row.backward_ms for row in rows) or 1.0
    headers = ("unit", "partition", "parameters", "bytes", "forward ms", "backward ms", "time")
    cells = (
        (
            row.unit, str(row.partition), f"{row.parameters:,}", format_bytes(row.bytes), f"{row.forward_ms:.2f}",
            f"{row.backward_ms:.2f}", f"{(row.forward_ms + row.backward_ms) / total_ms:.1%}",
        )
        for row in rows
    )  # fmt: skip
    return table(headers, cells, "<>>>>>>")
