"""A picture as PNG, drawn pixel by pixel: weft needs no library for it.

The edges of boxes are blended with what they cover, so that a box of half a pixel shows as half a box.
"""

from __future__ import annotations

import math
import struct
import zlib

from weft.report import font
from weft.report.shapes import Box, Line, Note, Picture
from weft.report.styles import IDLE, STYLES, TILE

INK = {"plain": "#24292f", "title": "#24292f", "number": "#ffffff", "tick": "#57606a"}
GRID = "#d0d7de"

Tile = tuple[bytes, ...]
"""`TILE` rows of `TILE` pixels, three bytes each."""


def png(picture: Picture) -> bytes:
    """The content of a PNG file: 8 bits a channel, no transparency."""
    page = _Page(picture.width, picture.height)
    for shape in picture.shapes:
        if isinstance(shape, Box):
            page.box(shape)
        elif isinstance(shape, Line):
            page.fill(shape.x - 0.5, shape.top, shape.x + 0.5, shape.bottom, _plain(GRID))
        else:
            page.note(shape)
    return _encode(page)


class _Page:
    """White paper. Rows are kept apart, so that they can be compressed as they are."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]

    def fill(self, left: float, top: float, right: float, bottom: float, tile: Tile) -> None:
        """Fill a rectangle; the first and the last column count as much as they are covered."""
        left, right = max(0.0, left), min(float(self.width), right)
        rows = range(max(0, round(top)), min(self.height, max(round(bottom), round(top) + 1)))
        if right <= left:
            return
        first, last = math.ceil(left), math.floor(right)
        if first > last:  # within one column
            self._blend(last, rows, right - left, tile)
            return
        if first > left:
            self._blend(first - 1, rows, first - left, tile)
        if right > last:
            self._blend(last, rows, right - last, tile)
        offset = 3 * (first % TILE)
        for y in rows if last > first else ():
            line = tile[y % TILE] * ((last - first) // TILE + 2)
            self.rows[y][3 * first : 3 * last] = line[offset : offset + 3 * (last - first)]

    def _blend(self, x: int, rows: range, share: float, tile: Tile) -> None:
        if not 0 <= x < self.width:
            return
        at = 3 * (x % TILE)
        for y in rows:
            row, colour = self.rows[y], tile[y % TILE][at : at + 3]
            for channel in range(3):
                below = row[3 * x + channel]
                row[3 * x + channel] = round(below + (colour[channel] - below) * share)

    def box(self, box: Box) -> None:
        right, bottom = box.x + box.width, box.y + box.height
        self.fill(box.x, box.y, right, bottom, _tile(box.kind))
        if box.edge and box.width >= 3:
            edge = _plain(box.edge)
            for left, width in ((box.x, 0.5), (right - 0.5, 0.5)):
                self.fill(left, box.y, left + width, bottom, edge)

    def note(self, note: Note) -> None:
        """Letters on whole pixels; a title is written twice, one pixel apart, which makes it bold."""
        colour = _rgb(note.ink or INK[note.role])
        x = round(note.x - (len(note.text) * font.WIDTH / 2 if note.role in ("number", "tick") else 0))
        for index, character in enumerate(note.text):
            for shift in (0, 1) if note.role == "title" else (0,):
                self._letter(x + index * font.WIDTH + shift, round(note.y) - font.BASELINE, character, colour)

    def _letter(self, x: int, y: int, character: str, colour: bytes) -> None:
        for down, bits in enumerate(font.glyph(character)):
            for right in range(font.WIDTH):
                inside = 0 <= x + right < self.width and 0 <= y + down < self.height
                if bits >> (font.WIDTH - 1 - right) & 1 and inside:
                    self.rows[y + down][3 * (x + right) : 3 * (x + right) + 3] = colour


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour.removeprefix("#"))


def _plain(colour: str) -> Tile:
    return (_rgb(colour) * TILE,) * TILE


def _made(kind: str) -> Tile:
    style = STYLES[kind]
    colours = (_rgb(style.fill), _rgb(style.stroke))
    return tuple(
        b"".join(colours[bits >> (TILE - 1 - column) & 1] for column in range(TILE))
        for bits in style.pattern.pixels
    )


_TILES = {kind: _made(kind) for kind in STYLES}


def _tile(kind: str) -> Tile:
    return _TILES[kind] if kind in _TILES else _plain(IDLE)


def _encode(page: _Page) -> bytes:
    header = struct.pack(">IIBBBBB", page.width, page.height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in page.rows), 9)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(*chunk) for chunk in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    )


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
