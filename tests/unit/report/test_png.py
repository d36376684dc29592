"""The pixels of a PNG are what the shapes say."""

from __future__ import annotations

import sys
from io import BytesIO

import pytest
from PIL import Image

from weft.errors import UsageError
from weft.report.picture import timeline_png, timeline_svg
from weft.report.png import SCALE, png
from weft.report.shapes import Box, Line, Note, Picture
from weft.report.styles import IDLE, STYLES, TILE
from weft.timeline import KINDS, Span, Timeline


def decoded(content: bytes) -> list[list[str]]:
    """Rows of colours."""
    image = Image.open(BytesIO(content))
    assert (image.format, image.mode) == ("PNG", "RGB")
    pixels = image.tobytes()
    width = 3 * image.width
    return [
        ["#" + pixels[at : at + 3].hex() for at in range(row, row + width, 3)]
        for row in range(0, len(pixels), width)
    ]


def drawn(
    *shapes: Box | Line | Note, width: int = 24, height: int = 16, every: int = SCALE
) -> list[list[str]]:
    """Of the picture's pixels, which are some of the file's each, the first one; with `every` 1 all of the file's."""
    return [row[::every] for row in decoded(png(Picture(width, height, "", shapes)))[::every]]


def test_a_box_covers_its_pixels_and_no_others():
    rows = drawn(Box(3, 2, 5, 4, "F"))
    blue = {
        (x, y) for y, row in enumerate(rows) for x, colour in enumerate(row) if colour == STYLES["F"].fill
    }
    assert blue == {(x, y) for x in range(3, 8) for y in range(2, 6)}
    assert {colour for row in rows for colour in row} == {STYLES["F"].fill, "#ffffff"}


def test_part_of_a_pixel_is_part_of_the_colour():
    row = drawn(Box(3.25 / SCALE, 0, 2.5 / SCALE, 1, "idle"), every=1)[0]
    mixed = f"#{''.join(f'{round(255 + (int(IDLE[i : i + 2], 16) - 255) * 0.75):02x}' for i in (1, 3, 5))}"
    assert row[2:7] == ["#ffffff", mixed, IDLE, mixed, "#ffffff"]
    within = drawn(Box(3.25 / SCALE, 0, 0.5 / SCALE, 1, "idle"), every=1)[0]
    assert within[3] not in (IDLE, "#ffffff") and within[4] == "#ffffff"


def test_what_lies_outside_is_cut_off():
    rows = drawn(Box(-5, -5, 100, 100, "idle"), Box(50, 50, 5, 5, "F"), Note(-3, 2, "WWWWWWWWWW"))
    assert rows[15][23] == IDLE


@pytest.mark.parametrize("kind", STYLES)
def test_every_kind_has_its_pattern(kind: str):
    style = STYLES[kind]
    rows = drawn(Box(0, 0, 24, 16, kind))
    for y in range(16):
        for x in range(24):
            bit = style.pattern.pixels[y % TILE] >> (TILE - 1 - x % TILE) & 1
            assert rows[y][x] == (style.stroke if bit else style.fill)


def test_kinds_differ_by_colour_and_by_pattern():
    styles = STYLES.values()
    assert set(STYLES) == set(KINDS) - {"step"}
    assert len({style.fill for style in styles}) == len(styles)
    together = {"F", "B", "I", "W", "wait"}
    patterns = [(STYLES[kind].pattern, kind) for kind in sorted(together)]
    assert len({pattern for pattern, _ in patterns}) >= 4
    assert STYLES["send"].pattern != STYLES["recv"].pattern
    assert all(len(style.pattern.pixels) == TILE for style in styles)


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("kind", ["F", "B", "I", "W"])
def test_numbers_can_be_read_on_their_ground(kind: str):
    """The contrast that WCAG 2 asks of text, 4.5 to 1."""
    one, other = sorted((luminance(STYLES[kind].fill), luminance(STYLES[kind].ink)))
    assert (other + 0.05) / (one + 0.05) >= 4.5


def dark(rows: list[list[str]]) -> set[tuple[int, int]]:
    return {(x, y) for y, row in enumerate(rows) for x, colour in enumerate(row) if colour != "#ffffff"}


def test_letters_stand_on_their_line():
    found = dark(drawn(Note(1, 12, "L")))
    assert max(y for _, y in found) == 11 and 1 <= min(x for x, _ in found) <= 3


def test_a_centred_note_is_centred():
    columns = [x for x, _ in dark(drawn(Note(12, 12, "8", "tick")))]
    assert abs((min(columns) + max(columns) + 1) / 2 - 12) <= 1


def test_without_pillow_a_picture_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"pip install 'weft\[pictures\]', or write a .svg"):
        png(Picture(1, 1, "", []))


def test_lines():
    rows = drawn(Line(5, 2, 9))
    assert {y for y, row in enumerate(rows) if set(row) != {"#ffffff"}} == set(range(2, 9))


def test_a_pixel_of_the_picture_is_a_square_of_the_file():
    rows = drawn(Box(3, 2, 5, 4, "F"), every=1)
    blue = {
        (x, y) for y, row in enumerate(rows) for x, colour in enumerate(row) if colour == STYLES["F"].fill
    }
    assert blue == {(x, y) for x in range(3 * SCALE, 8 * SCALE) for y in range(2 * SCALE, 6 * SCALE)}


def test_both_pictures_have_the_same_size():
    timeline = Timeline([Span(0, "F", 0, 0.0, 1.0), Span(2, "send", 0, 0.0, 1.0)])
    rows = decoded(timeline_png(timeline, "x"))
    assert f'width="{len(rows[0]) // SCALE}" height="{len(rows) // SCALE}"' in timeline_svg(timeline, "x")
