"""A picture as PNG, drawn with Pillow (``pip install weft[pictures]``)."""

from __future__ import annotations

import math
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from weft.errors import UsageError
from weft.report.shapes import Box, Line, Note, Picture
from weft.report.styles import IDLE, STYLES, TILE

if TYPE_CHECKING:
    from PIL import Image

INK = {"plain": "#24292f", "title": "#24292f", "number": "#ffffff", "tick": "#57606a"}
GRID = "#d0d7de"
SIZES = {"plain": 15, "title": 19, "number": 14, "tick": 14}
"""Heights of letters, in the picture's own pixels."""
SCALE = 2
"""Pixels of the file for each of the picture: letters stay smooth on screens of today, and when somebody zooms in."""


def png(picture: Picture) -> bytes:
    """The content of a PNG file: 8 bits a channel, no transparency.

    Raises:
        UsageError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont  # nobody else needs it: pictures as SVG need no library
    except ImportError:
        raise UsageError(
            "a .png is drawn with Pillow, which is not installed: pip install 'weft[pictures]', or write a .svg"
        ) from None
    page = Image.new("RGB", (picture.width * SCALE, picture.height * SCALE), "white")
    pen = ImageDraw.Draw(page)
    for shape in map(_larger, picture.shapes):
        if isinstance(shape, Box):
            _box(page, shape)
        elif isinstance(shape, Line):
            _fill(page, shape.x - SCALE / 2, shape.top, shape.x + SCALE / 2, shape.bottom, _tile("", GRID))
        else:
            font = ImageFont.load_default(SIZES[shape.role] * SCALE)
            anchor = "ms" if shape.role in ("number", "tick") else "ls"
            pen.text((shape.x, shape.y), shape.text, shape.ink or INK[shape.role], font, anchor)
    file = BytesIO()
    page.save(file, "PNG", optimize=True)
    return file.getvalue()


def _larger(shape: Box | Line | Note) -> Box | Line | Note:
    """The shape in pixels of the file."""
    if isinstance(shape, Line):
        return Line(*(SCALE * length for length in shape))
    moved = shape._replace(x=SCALE * shape.x, y=SCALE * shape.y)
    if isinstance(moved, Box):
        return moved._replace(width=SCALE * moved.width, height=SCALE * moved.height)
    return moved


def _box(page: Image.Image, box: Box) -> None:
    right, bottom = box.x + box.width, box.y + box.height
    _fill(page, box.x, box.y, right, bottom, _tile(box.kind, IDLE))
    if box.edge and box.width >= 3 * SCALE:
        edge = 0.5 * SCALE
        for left in (box.x, right - edge):
            _fill(page, left, box.y, left + edge, bottom, _tile("", box.edge))


def _fill(page: Image.Image, left: float, top: float, right: float, bottom: float, tile: Image.Image) -> None:
    """Fill a rectangle. A column counts as much as it is covered, so that half a pixel shows as half a box."""
    from PIL import Image

    left, right = max(0.0, left), min(float(page.width), right)
    rows = max(0, round(top)), min(page.height, max(round(bottom), round(top) + 1))
    columns = math.floor(left), math.ceil(right)
    if right <= left or rows[1] <= rows[0]:
        return
    covered = [min(x + 1, right) - max(x, left) for x in range(*columns)]
    mask = Image.new("L", (len(covered), 1))
    mask.putdata([round(255 * share) for share in covered])
    size = columns[1] - columns[0], rows[1] - rows[0]
    ground = Image.new("RGB", size)
    for x in range(-(columns[0] % tile.width), size[0], tile.width):  # patterns of neighbours fit together
        for y in range(-(rows[0] % tile.height), size[1], tile.height):
            ground.paste(tile, (x, y))
    page.paste(ground, (columns[0], rows[0]), mask.resize(size))


@cache
def _tile(kind: str, colour: str) -> Image.Image:
    """`TILE` times `TILE` of the picture's pixels of a kind's pattern; of one colour, if the kind has no style."""
    from PIL import Image

    tile = Image.new("RGB", (TILE * SCALE, TILE * SCALE), colour)
    if kind in STYLES:
        style = STYLES[kind]
        for y, bits in enumerate(style.pattern.pixels):
            for x in range(TILE):
                ink = style.stroke if bits >> (TILE - 1 - x) & 1 else style.fill
                tile.paste(ink, (SCALE * x, SCALE * y, SCALE * (x + 1), SCALE * (y + 1)))
    return tile
