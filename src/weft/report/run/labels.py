"""The names and looks of a step's parts; figures as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft.report.styles import DOTS, FALLING, LEVEL, RISING, STYLES, UPRIGHT, Style
from weft.units import format_seconds

_OF_KIND = {
    "forward": "F", "backward": "B", "backward_inputs": "I", "backward_weights": "W", "optimizer": "optimizer",
    "transfer": "recv", "reduce": "reduce", "tensor": "tensor", "data": "data", "copy": "copy",
    "checkpoint": "checkpoint", "collector": "collector", "prepare": "prepare",
}  # fmt: skip
PARTS = {
    **{part: STYLES[kind] for part, kind in _OF_KIND.items()},
    "transfer": STYLES["recv"]._replace(name="waiting for transfers"),
    "warmup": Style("bubble, warm-up", "#d5dbe2", "#24292f", LEVEL, "#a9b3be", 1.5),
    "steady": Style("bubble, steady", "#e4d7cf", "#24292f", FALLING, "#b79f90"),
    "drain": Style("bubble, drain", "#d5e0d8", "#24292f", UPRIGHT, "#a3b5a8", 1.5),
    "host": Style("host: Python, the script", "#c9c2d6", "#24292f", DOTS, "#8f85a5"),
}
"""By the names of `weft.analysis.parts.Parts`, in their order."""
RUN_PARTS = {
    "start": STYLES["prepare"]._replace(name="start: imports, weft.init"),
    "load": STYLES["copy"]._replace(name="model and data, before the first step"),
    "first": STYLES["W"]._replace(name="the first step: trace, split, proof"),
    "train": STYLES["F"]._replace(name="training"),
    "idle": PARTS["warmup"]._replace(name="waiting for other ranks"),
    "evaluate": STYLES["B"]._replace(name="evaluation"),
    "data": PARTS["data"],
    "checkpoint": PARTS["checkpoint"],
    "host": PARTS["host"]._replace(name="the script between steps"),
    "lost": PARTS["host"]._replace(name="lost: after the last step that ended"),
}
"""By the names of `weft.analysis.run_time.RunTime`, in their order."""
LOOKS = (
    PARTS
    | {name: style for name, style in RUN_PARTS.items() if name not in PARTS}
    | {
        "now": STYLES["F"]._replace(name="work now"),
        "suggested": STYLES["B"]._replace(name="work with the suggested split"),
    }
)
"""All pieces of bars."""

LINES = (
    Style("", "#3b76b8", "#ffffff", RISING, ""), Style("", "#c8741a", "#ffffff", RISING, "6 3"),
    Style("", "#3f8f5b", "#ffffff", RISING, "2 2"), Style("", "#8a63b5", "#ffffff", RISING, "8 3 2 3"),
    Style("", "#b8507a", "#ffffff", RISING, "1 3"), Style("", "#1f8a9c", "#ffffff", RISING, "10 4"),
    Style("", "#8a7a3a", "#ffffff", RISING, "4 2 1 2 1 2"), Style("", "#7a8590", "#ffffff", RISING, "3 5"),
)  # fmt: skip
"""Colours and dashes of lines, so that they differ without colour, too."""


MOST_RANKS = 64
"""Rows of ranks that a table shows."""


def of_ranks(caption: str, ranks: int) -> str:
    """The caption of a table with a row for each rank, which says where there are too many.

    >>> of_ranks("Memory", 4), of_ranks("Memory", 100)
    ('Memory', 'Memory (the first 64 of 100 ranks)')
    """
    return caption if ranks <= MOST_RANKS else f"{caption} (the first {MOST_RANKS} of {ranks} ranks)"


class Table(NamedTuple):
    """Figures as text.

    Attributes:
        align: For each column `<` or `>`; the first is the name of the row.
        strong: Cells to mark, as (row, column), each with a weight from 0 to 1.
    """

    caption: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    align: str = "<"
    strong: dict[tuple[int, int], float] = {}

    def turned(self) -> Table:
        """Rows as columns; the heading of the first column stays.

        >>> Table("", ("rank", "ms"), [("0", "5"), ("1", "7")]).turned().rows
        [('ms', '5', '7')]
        """
        names, *columns = zip(self.headers, *self.rows, strict=True)
        headers = (self.headers[0], *names[1:])
        return Table(self.caption, headers, columns, "<".ljust(len(headers), ">"))


def number(value: float, digits: int = 4) -> str:
    """A figure with so many digits that count.

    >>> number(1234.5), number(0.00012345), number(3.0), number(float("nan"))
    ('1234', '0.0001234', '3', 'nan')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if not math.isfinite(value) or isinstance(value, int):
        return str(value)
    if abs(value) >= 10 ** (digits - 1) and abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def milliseconds(seconds: float) -> str:
    """Milliseconds with as many digits as are worth reading.

    >>> milliseconds(0.0123456), milliseconds(12.5), milliseconds(0.0)
    ('12.35', '12500', '0')
    """
    value = seconds * 1e3
    size = abs(value)
    if size < 0.0005:
        return "0"
    return f"{value:.{3 if size < 1 else 2 if size < 100 else 1 if size < 1000 else 0}f}"


def percent(share: float) -> str:
    """A share of 1.

    >>> percent(0.2727)
    '27.3%'
    """
    return f"{share:.1%}"


def duration(seconds: float) -> str:
    """A duration in the unit that fits.

    >>> duration(0.0123), duration(95.0), duration(7260.0), duration(0.0), duration(float("nan"))
    ('12.3 ms', '1 min 35 s', '2 h 1 min', '0', 'nan')
    """
    if seconds == 0.0 or not math.isfinite(seconds):
        return number(seconds)
    if seconds < 60.0:
        return format_seconds(seconds)
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def sentence(text: str) -> str:
    """The text with a capital at its begin and a full stop.

    >>> sentence("a rank waits"), sentence("Why?"), sentence("")
    ('A rank waits.', 'Why?', '')
    """
    return text if not text else text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")
