"""The page in headless Chromium, which the network is taken from.

Skipped, and counted, where Chromium or Playwright is missing: docs/design/tests.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser.opened import Opened
from tests.golden.timelines import STEP
from weft.report.page import Entry, page
from weft.report.styles import STYLES
from weft.timeline import Span, Timeline

SLOWER = Timeline(replace(span, start_s=1.5 * span.start_s, end_s=1.5 * span.end_s) for span in STEP.spans)


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    pages: list[Opened] = []

    def open_page(*entries: Entry, title: str = "a page", scheme: str = "light") -> Opened:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_text(page(title, entries), encoding="utf-8")
        pages.append(Opened(browser, path, scheme))
        return pages[-1]

    yield open_page
    for one in pages:
        one.close()


def test_it_draws_every_kind_in_its_colour(opened: Callable[..., Opened]):
    colours = opened(Entry("recorded", STEP)).colours()
    for kind, style in STYLES.items():
        assert style.fill in colours, f"{kind} is not drawn"
        assert style.stroke in colours or not style.pattern.path or style.stroke_width == 1.5, (
            f"{kind} has no pattern"
        )


def test_both_themes(opened: Callable[..., Opened]):
    light = opened(Entry("recorded", STEP))
    assert "#ffffff" in light.colours() and "#eef0f3" in light.colours()
    dark = opened(Entry("recorded", STEP), scheme="dark")
    assert {"#14181d", "#222932"} <= dark.colours() and "#eef0f3" not in dark.colours()
    light.page.emulate_media(color_scheme="dark")
    assert light.pixels() == dark.pixels(), "the theme may change while the page is open"


def test_figures_are_those_of_the_timelines(opened: Callable[..., Opened]):
    found = opened(Entry("planned", STEP), Entry("recorded", SLOWER))
    shown = found.page.evaluate("weft.idle()")
    assert [(row["timeline"], row["rank"]) for row in shown] == [
        ("planned", 0), ("planned", 1), ("recorded", 0), ("recorded", 1),
    ]  # fmt: skip
    expected = [timeline.idle_share(rank) for timeline in (STEP, SLOWER) for rank in (0, 1)]
    assert [row["idle"] for row in shown] == pytest.approx(expected, abs=1e-6)
    cells = found.page.locator("table tbody td:nth-of-type(1)").all_text_contents()
    assert cells == [
        *(f"{share:.1%}" for share in expected[:2]), f"{STEP.bubble:.1%}",
        *(f"{share:.1%}" for share in expected[2:]), f"{SLOWER.bubble:.1%}",
    ]  # fmt: skip
    assert found.view()["end"] == pytest.approx(SLOWER.duration_s * 1e9)


def test_figures_of_overlapping_spans_and_of_a_part(opened: Callable[..., Opened]):
    """What the script adds up by halving, against a sum over all spans."""
    random_numbers = random.Random(5)
    spans = []
    for _ in range(300):
        start = random_numbers.uniform(0, 50)
        spans.append(Span(0, random_numbers.choice("FBIW"), 0, start, start + random_numbers.uniform(0, 0.3)))
    timeline = Timeline(spans).shifted(-Timeline(spans).start_s)
    found = opened(Entry("recorded", timeline))
    assert found.page.evaluate("weft.idle()[0].idle") == pytest.approx(timeline.idle_share(0), abs=1e-6)
    for _ in range(5):
        start, end = sorted(random_numbers.uniform(0, timeline.duration_s) for _ in range(2))
        found.page.evaluate("([start, end]) => weft.setView(start, end)", [start * 1e9, end * 1e9])
        inside = [
            Span(0, s.kind, 0, max(s.start_s, start), min(s.end_s, end))
            for s in timeline.spans
            if s.start_s < end and s.end_s > start
        ]
        expected = 1 - Timeline(inside).busy_s(0) / (end - start)
        assert found.page.evaluate("weft.idle()[0].idle") == pytest.approx(expected, abs=1e-6)


def test_zoom_and_pan_by_keys(opened: Callable[..., Opened]):
    found = opened(Entry("recorded", STEP))
    length = STEP.duration_s * 1e9
    before = found.pixels()
    found.press("+", "+")
    view = found.view()
    assert view["end"] - view["start"] == pytest.approx(length / 4)
    closer = found.pixels()
    assert closer != before
    found.press("ArrowRight")
    later = found.view()
    assert later["start"] == pytest.approx(view["start"] + 0.2 * length / 4)
    assert found.pixels() != closer
    found.press("ArrowLeft")
    assert found.view()["start"] == pytest.approx(view["start"])
    found.press("-")
    assert found.view()["end"] - found.view()["start"] == pytest.approx(length / 2)
    found.press("Home")
    assert (found.view()["start"], found.view()["end"]) == (0, length)
    found.press(*"-" * 5, *["ArrowLeft"] * 5)
    assert (found.view()["start"], found.view()["end"]) == (0, length), "there is nothing outside"
    found.press(*"+" * 40)
    assert found.view()["end"] - found.view()["start"] == pytest.approx(50), "nanoseconds, the narrowest"


def test_zoom_and_pan_by_mouse(opened: Callable[..., Opened]):
    found = opened(Entry("recorded", STEP))
    box = found.page.locator("#canvas").bounding_box()
    place = found.page.evaluate("weft.place(0, 5e6)")
    found.page.mouse.move(box["x"] + place["x"], box["y"] + place["y"])
    found.page.mouse.wheel(0, -200)
    view = found.view()
    assert view["end"] - view["start"] < 0.8 * STEP.duration_s * 1e9
    assert found.page.evaluate("weft.place(0, 5e6).x") == pytest.approx(place["x"], abs=1), (
        "it stays under the pointer"
    )
    found.page.mouse.down()
    found.page.mouse.move(box["x"] + place["x"] - 100, box["y"] + place["y"], steps=4)
    found.page.mouse.up()
    assert found.page.evaluate("weft.place(0, 5e6).x") == pytest.approx(place["x"] - 100, abs=1)
    moved = found.view()
    assert moved["end"] - moved["start"] == pytest.approx(view["end"] - view["start"])
    found.page.click("button[data-do=all]")
    assert found.view()["end"] == pytest.approx(STEP.duration_s * 1e9)
    found.page.click("button[data-do=in]")
    assert found.view()["end"] - found.view()["start"] == pytest.approx(STEP.duration_s * 0.5e9)


def test_a_span_tells_what_it_is(opened: Callable[..., Opened]):
    label = "</div><b>x</b>"
    timeline = STEP.merged(Timeline([Span(0, "B", 7, 11.1e-3, 12.1e-3, 0, label, 3)]))
    found = opened(Entry("recorded", timeline))
    box = found.page.locator("#canvas").bounding_box()
    place = found.page.evaluate("weft.place(0, 11.6e6)")
    found.page.mouse.move(box["x"] + place["x"], box["y"] + place["y"])
    expected = [
        f"backward: {label}",
        "rank 0, microbatch 7, stage 0, step 3",
        "1.000 ms, from 11.1000 to 12.1000 ms",
    ]
    assert found.page.evaluate("weft.hovered()") == expected
    assert found.page.text_content("#tip") == "\n".join(expected)
    assert found.page.locator("#tip b").count() == 0
    found.page.mouse.down()
    found.page.mouse.up()
    assert found.said() == " · ".join(expected)
    found.page.mouse.move(box["x"] + 2, box["y"] + 2)
    assert found.page.evaluate("weft.hovered()") is None and not found.page.is_visible("#tip")


def test_the_keyboard_reaches_every_span(opened: Callable[..., Opened]):
    found = opened(Entry("planned", STEP), Entry("recorded", SLOWER))
    found.press("ArrowDown")
    assert found.said().startswith("planned, rank 1: idle ")
    heard = []
    for _ in range(3):
        found.press(".")
        heard.append(found.said().split(" · ")[0])
    assert heard == ["waiting: for rank 0", "forward", "backward, inputs"]
    found.press(",")
    assert found.said().startswith("forward")
    found.press("Enter")
    assert found.view()["start"] == pytest.approx(0.5e6) and found.view()["end"] == pytest.approx(6.5e6)
    found.press("Escape", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown")
    assert found.said().startswith("recorded, rank 1: idle ")


def test_what_a_screen_reader_is_told(opened: Callable[..., Opened]):
    found = opened(Entry("recorded", STEP))
    canvas = found.page.locator("#canvas")
    assert canvas.get_attribute("tabindex") == "0"
    assert canvas.get_attribute("aria-label").startswith("Timeline. recorded: 2 ranks, 20.500 ms, bubble ")
    assert found.page.is_visible("#help") and canvas.get_attribute("aria-describedby") == "help"
    found.page.keyboard.press("Tab")
    assert found.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Zoom in"


def test_steps(opened: Callable[..., Opened]):
    timeline = Timeline()
    for number in range(1, 4):
        later = STEP.shifted(0.03 * (number - 1))
        timeline = timeline.merged(Timeline(replace(span, step=number) for span in later.spans))
    found = opened(Entry("recorded", timeline))
    assert found.page.text_content("#step") == "3 steps"
    found.press("]")
    assert (found.view()["start"], found.view()["end"]) == pytest.approx((0, 20.5e6))
    found.page.click("button[data-do=after]")
    assert (found.view()["start"], found.view()["end"]) == pytest.approx((30e6, 50.5e6))
    assert found.page.text_content("#step") == "step 2"
    assert not opened(Entry("recorded", STEP)).page.is_visible("#stepping")


def test_many_spans_are_merged(opened: Callable[..., Opened]):
    """64,000 spans on 16 ranks: about as many boxes as columns of pixels, and each one when it is large enough."""
    spans = [
        Span(rank, "FB"[number % 2], number % 64, number * 1e-3, (number + 0.8) * 1e-3)
        for rank in range(16)
        for number in range(4000)
    ]
    found = opened(Entry("recorded", Timeline(spans)))
    assert found.view()["drawn"] <= 16 * 1200
    found.page.evaluate("weft.setView(1000e6, 1100e6)")
    assert found.view()["drawn"] == pytest.approx(16 * 100, abs=32)
    assert found.page.evaluate("weft.idle()[0].idle") == pytest.approx(0.2, abs=1e-6)


def test_more_ranks_than_fit_scroll(opened: Callable[..., Opened]):
    found = opened(Entry("recorded", Timeline([Span(rank, "F", 0, 0.0, 1.0) for rank in range(100)])))
    first = found.pixels()
    found.press(*["ArrowDown"] * 99)
    assert found.said().startswith("recorded, rank 99")
    place = found.page.evaluate("weft.place(99, 5e8)")
    assert 0 < place["y"] < found.page.locator("#canvas").bounding_box()["height"]
    assert found.pixels() != first


def test_a_hostile_title_and_nothing_to_draw(opened: Callable[..., Opened]):
    title = "</title><script>console.log('run')</script>"
    found = opened(Entry(title, Timeline()), title=title)
    assert found.page.title() == title and found.page.text_content("h1") == title
    found.press("+", ".", "ArrowDown", "]", "Enter", "Home")


def test_other_scripts_do_not_run(browser: Any, tmp_path: Path):
    """The policy holds even if markup came through: only the page's own script has its hash."""
    path = tmp_path / "page.html"
    path.write_text(
        page("x", [Entry("y", STEP)]).replace("</main>", "<script>window.ran = 1</script></main>")
    )
    found = Opened(browser, path, "light")
    assert found.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in text for text in found.complaints)
    fetched = found.page.evaluate("fetch('https://localhost/x').then(() => 'got', error => error.message)")
    assert fetched != "got"
    found.context.close()
