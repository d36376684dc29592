"""The look of each kind of span, the same in every picture and on the page: a colour and a pattern.

Kinds differ by pattern, too, without colour (in print, or for who sees few colours). It is drawn once as a
tile of `TILE` x `TILE` pixels: strokes for SVG and for the browser's canvas, pixels for PNG.
"""

from __future__ import annotations

from typing import NamedTuple

TILE = 8


class Pattern(NamedTuple):
    """Strokes over a ground.

    Attributes:
        path: An SVG path over one tile; empty for none.
        pixels: The tile's rows, from the top; the leftmost pixel is the highest bit.
    """

    path: str
    pixels: tuple[int, ...]


PLAIN = Pattern("", (0,) * TILE)
RISING = Pattern("M-2 2L2-2M-2 10L10-2M6 10L10 6", (0x81, 0x03, 0x06, 0x0C, 0x18, 0x30, 0x60, 0xC0))
FALLING = Pattern("M-2 6L2 10M-2-2L10 10M6-2L10 2", (0x81, 0xC0, 0x60, 0x30, 0x18, 0x0C, 0x06, 0x03))
DOTS = Pattern("M1 2H3M5 6H7", (0x00, 0x60, 0x60, 0x00, 0x00, 0x06, 0x06, 0x00))
UPRIGHT = Pattern("M2 0V8M6 0V8", (0x22,) * TILE)
LEVEL = Pattern("M0 2H8M0 6H8", (0x00, 0x00, 0xFF, 0x00, 0x00, 0x00, 0xFF, 0x00))
GRID = Pattern("M0 4.5H8M4.5 0V8", (0x08, 0x08, 0x08, 0x08, 0xFF, 0x08, 0x08, 0x08))


class Style(NamedTuple):
    """A kind's name for people, its ground, what is written on it, and the strokes of its pattern."""

    name: str
    fill: str
    ink: str
    pattern: Pattern
    stroke: str
    stroke_width: float = 2.0


STYLES = {
    "F": Style("forward", "#3b76b8", "#ffffff", PLAIN, "#ffffff"),
    "B": Style("backward", "#e39a3b", "#24292f", RISING, "#eebb78"),
    "I": Style("backward, inputs", "#efc04c", "#24292f", FALLING, "#f6d88c"),
    "W": Style("backward, weights", "#9c4f2e", "#ffffff", DOTS, "#c98a6c"),
    "wait": Style("waiting", "#eef0f3", "#24292f", FALLING, "#c3cad2"),
    "send": Style("sending", "#3f8f5b", "#ffffff", UPRIGHT, "#a5d0b3", 1.5),
    "recv": Style("receiving", "#8a63b5", "#ffffff", LEVEL, "#cdb8e2", 1.5),
    "reduce": Style("averaging gradients", "#5f7480", "#ffffff", GRID, "#93a4ae", 1.0),
    "tensor": Style("tensor parallel", "#2a5d52", "#ffffff", DOTS, "#86ada4"),
    "optimizer": Style("optimizer", "#b8507a", "#ffffff", GRID, "#dc9ab6", 1.0),
    "data": Style("waiting for data", "#c0392b", "#ffffff", RISING, "#e08a80"),
    "copy": Style("copying to the device", "#1f7a8c", "#ffffff", UPRIGHT, "#8cc2cc", 1.5),
    "checkpoint": Style("saving", "#6b5b2a", "#ffffff", LEVEL, "#b3a677", 1.5),
    "collector": Style("garbage collector", "#4a4a4a", "#ffffff", DOTS, "#bdbdbd"),
    "prepare": Style("tracing and splitting", "#4f6d3a", "#ffffff", FALLING, "#a3bb92"),
}
"""By kind, in the order of the legend. A step has none: it is what the others are parts of."""

IDLE = "#eef0f3"
