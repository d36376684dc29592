"""The shapes of a picture, before it is SVG or PNG. Lengths are in pixels, y grows downwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Role = Literal["plain", "title", "number", "tick"]


class Box(NamedTuple):
    """A rectangle that looks as its kind does in `weft.report.styles`, or as idle ground."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    edge: str = ""
    """The colour of its edge, if it has one."""
    told: str = ""
    """What is shown to a pointer that rests on it."""


class Line(NamedTuple):
    """A thin upright line."""

    x: float
    top: float
    bottom: float


class Note(NamedTuple):
    """Text that stands on the line y. Numbers and ticks are centred at x, the others begin there."""

    x: float
    y: float
    text: str
    role: Role = "plain"
    ink: str = ""


class Picture(NamedTuple):
    """Shapes in the order of drawing, on white."""

    width: int
    height: int
    title: str
    shapes: Sequence[Box | Line | Note]
