"""The shapes of a picture, and a picture as SVG: one file, no scripts, nothing from outside.

Lengths are in pixels, y grows downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

from weft.report.styles import IDLE, STYLES, TILE
from weft.terminal_text import LINES, visible

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
    tooltip: str = ""
    """The text shown to a pointer that rests on it."""


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


_STYLE = """\
text { font: 13px "DejaVu Sans", Verdana, Helvetica, Arial, sans-serif; fill: #24292f }
.title { font-size: 17px; font-weight: bold }
.number { font-size: 12px; text-anchor: middle }
.tick { font-size: 12px; fill: #57606a; text-anchor: middle }
.grid { stroke: #d0d7de; stroke-width: 1 }"""


def svg(picture: Picture) -> str:
    """The text of an SVG file."""
    width, height, title, shapes = picture
    kinds = {shape.kind for shape in shapes if isinstance(shape, Box)}
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>{text(title)}</title>",
            f"<style>{_STYLE}</style>",
            "<defs>",
            *(_pattern(kind) for kind, style in STYLES.items() if kind in kinds and style.pattern.path),
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *map(_shape, shapes),
            "</svg>",
            "",
        ]
    )


def _pattern(kind: str) -> str:
    style = STYLES[kind]
    return (
        f'<pattern id="weft-{kind}" width="{TILE}" height="{TILE}" patternUnits="userSpaceOnUse">'
        f'<rect width="{TILE}" height="{TILE}" fill="{style.fill}"/>'
        f'<path d="{style.pattern.path}" stroke="{style.stroke}" stroke-width="{style.stroke_width:g}"/></pattern>'
    )


def _shape(shape: Box | Line | Note) -> str:
    if isinstance(shape, Line):
        x = f"{shape.x:.1f}"
        return f'<line class="grid" x1="{x}" x2="{x}" y1="{shape.top:g}" y2="{shape.bottom:g}"/>'
    if isinstance(shape, Note):
        role = "" if shape.role == "plain" else f' class="{shape.role}"'
        ink = f' style="fill:{shape.ink}"' if shape.ink else ""
        return f'<text{role} x="{shape.x:.2f}" y="{shape.y:.0f}"{ink}>{text(shape.text)}</text>'
    edge = f' stroke="{shape.edge}" stroke-width="{min(1.0, shape.width / 4):.2f}"' if shape.edge else ""
    box = (
        f'<rect x="{shape.x:.2f}" y="{shape.y:.1f}" width="{shape.width:.2f}" height="{shape.height:.1f}" '
        f'fill="{_fill(shape.kind)}"{edge}'
    )
    return f"{box}><title>{text(shape.tooltip)}</title></rect>" if shape.tooltip else f"{box}/>"


def _fill(kind: str) -> str:
    if kind not in STYLES:
        return IDLE
    return f"url(#weft-{kind})" if STYLES[kind].pattern.path else STYLES[kind].fill


def text(value: str) -> str:
    """The one place where text enters the picture: no markup, and nothing that cannot be seen or that XML forbids."""
    return escape(visible(value, LINES), quote=True)
