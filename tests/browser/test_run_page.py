"""The page of a run in headless Chromium, which the network is taken from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser.opened import Opened
from tests.long import one_in
from tests.unit.report.run.reports import EXPECTED, HOSTILE, MS, hostile, made, report
from weft.analysis.analysis import Analysis
from weft.analysis.compare import compare
from weft.analysis.scaling import scale
from weft.report.run import comparison_tables, step_tables
from weft.report.run.labels import sentence
from weft.report.run.page import run_page, sections
from weft.report.run.report import Report
from weft.terminal_text import LINES, visible
from weft.timeline import Span, Timeline


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    pages: list[Opened] = []

    def open_page(of: Report, **more: Any) -> Opened:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_text(run_page(of), encoding="utf-8")
        pages.append(Opened(browser, path, **more))
        return pages[-1]

    yield open_page
    for one in pages:
        one.close()


@pytest.fixture(scope="module")
def usual() -> Report:
    """A run with everything that a page may show, beside another one."""
    runs = [made(str(n), replicas=n, data_s=3 * MS, reduce_s=n * MS, planned=EXPECTED) for n in (1, 2)]
    old, new = map(Analysis, runs)
    return report(runs[0], comparison=compare(new, old), scaling=scale([old, new]))


def rows(found: Opened, section: str) -> list[list[str]]:
    """The cells of the first table of a section, row by row."""
    return found.page.eval_on_selector(
        f"#{section} table",
        "table => [...table.tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent.trim()))",
    )


def test_figures_are_those_of_the_analysis(opened: Callable[..., Opened], usual: Report):
    found = opened(usual)
    assert rows(found, "parts") == [[*row] for row in step_tables.parts(usual).rows]
    assert usual.plan is not None
    assert rows(found, "plan") == [[*row] for row in comparison_tables.planned(usual.plan)[0].rows]
    assert usual.plan.text in found.page.text_content("#plan")
    assert rows(found, "waits") == [[*row] for row in step_tables.waits(usual).rows]
    verdict = found.page.locator("#verdict")
    assert usual.verdict.text in verdict.text_content()
    assert verdict.get_attribute("data-status") == usual.verdict.status.value
    shown = found.page.eval_on_selector_all(
        "article", "all => all.map(a => [a.dataset.rule, a.dataset.status])"
    )
    assert shown == [[finding.rule, finding.status.value] for finding in usual.found]
    idle = {
        (row["timeline"], row["rank"]): row["idle"]
        for row in found.page.evaluate("weft.setView(0, 1e18), weft.idle()")
    }
    timeline = usual.analysis.timeline
    for rank in timeline.ranks:
        assert idle["recorded", rank] == pytest.approx(timeline.idle_share(rank), abs=1e-3)


def test_bars_are_as_long_as_their_parts(opened: Callable[..., Opened], usual: Report):
    found = opened(usual)
    widths = found.page.eval_on_selector_all(
        "#parts svg.bar",
        "all => all.map(s => [...s.querySelectorAll('rect')].map(r => r.getBoundingClientRect().width))",
    )
    whole = found.page.eval_on_selector("#parts svg.bar", "bar => bar.getBoundingClientRect().width")
    for bar, parts in zip(widths, usual.analysis.typical.values(), strict=True):
        expected = [whole * seconds / parts.total for seconds in parts if seconds]
        assert bar == pytest.approx(expected, abs=0.5)


def test_it_opens_at_the_usual_step_and_goes_to_others(opened: Callable[..., Opened], usual: Report):
    found = opened(usual)
    step = usual.usual_step
    assert found.page.text_content("#step") == f"step {step}"
    assert found.page.input_value("#pick") == str(step)
    found.page.select_option("#pick", "5")
    found.settle()
    assert found.page.text_content("#step") == "step 5"
    spans = [span for span in usual.analysis.timeline.spans if span.step == 5]
    start, end = (
        1e9 * (time - usual.analysis.timeline.start_s)
        for time in (min(s.start_s for s in spans), max(s.end_s for s in spans))
    )
    view = found.view()
    assert view["start"] < start and view["end"] > end and view["end"] - view["start"] < 1.1 * (end - start)
    found.press("]")
    assert found.page.text_content("#step") == "step 6"
    found.page.select_option("#pick", "")
    assert found.view()["start"] == 0


def test_findings_show_themselves_on_the_timeline(opened: Callable[..., Opened], usual: Report):
    found = opened(usual)
    for number, finding in enumerate(usual.found):
        link = found.page.locator("article a[data-step]").nth(number)
        link.focus()
        found.page.keyboard.press("Enter")
        found.settle()
        assert found.page.text_content("#step") == f"step {usual.step_of(finding)}"
        assert found.page.evaluate("document.activeElement.id") == "canvas"
        assert found.page.locator("#timeline h2").evaluate(
            "e => Math.abs(e.getBoundingClientRect().top) < innerHeight"
        )


def test_arrows_go_where_they_can_be_seen(opened: Callable[..., Opened], usual: Report):
    found = opened(usual)
    step = usual.usual_step
    messages = [message for message in usual.analysis.messages if message.step == step]
    assert found.view()["arrows"] == pytest.approx(len(messages), abs=2)
    found.press("Home")
    assert found.view()["arrows"] == 0, "more than the eye can follow are left out"


def test_the_ideal_stands_above_every_step(opened: Callable[..., Opened], usual: Report):
    found = opened(usual)
    for step in ("3", "12"):
        found.page.select_option("#pick", step)
        found.settle()
        idle = {row["timeline"]: row["idle"] for row in found.page.evaluate("weft.idle()")}
        assert set(idle) == {"recorded", "ideal: equal partitions, free transfers"}
        assert idle["ideal: equal partitions, free transfers"] < 0.6


def test_everything_can_be_reached_by_keys(opened: Callable[..., Opened], usual: Report):
    found = opened(usual)
    reached = []
    for _ in range(60):
        found.page.keyboard.press("Tab")
        reached.append(found.page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if reached[-1] == "canvas":
            break
    assert reached[-1] == "canvas" and {"A", "SUMMARY", "BUTTON", "pick"} <= set(reached)
    found.page.keyboard.press("ArrowDown")
    assert found.page.text_content("#said").startswith("ideal")


@pytest.mark.parametrize(
    ("scheme", "width"), one_in(6, itertools.product(["light", "dark"], [1280, 380, 320]))
)
def test_the_page_never_scrolls_to_the_side(
    opened: Callable[..., Opened], usual: Report, width: int, scheme: str
):
    for of in (usual, report(hostile())):
        found = opened(of, width=width, scheme=scheme)
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width
        found.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(opened: Callable[..., Opened], usual: Report, scheme: str):
    """At least 4.5 to 1 between text and the page's ground, as WCAG 2 asks for."""
    found = opened(usual, scheme=scheme)
    ratios = found.page.evaluate(
        """() => {
        const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        const light = (css) => { const [r, g, b] = css.match(/[\\d.]+/g).map(Number);
          return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
        const ground = light(getComputedStyle(document.body).backgroundColor);
        const texts = "p, td, th, h2, h3, li, a, .status, .note, figcaption, dt, dd, caption";
        return [...document.querySelectorAll(texts)].map((e) => {
          const text = light(getComputedStyle(e).color);
          return [(Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05), e.className || e.tagName];
        }); }"""
    )
    assert ratios and min(ratios)[0] >= 4.5, min(ratios)


def test_without_scripts_all_figures_are_there(opened: Callable[..., Opened], usual: Report):
    found = opened(usual, scripts=False)
    seen = " ".join(found.page.locator("body").text_content().split())
    assert usual.verdict.text in seen and "Scripts are off, so the timeline is not drawn." in seen
    for finding in usual.found:
        assert sentence(finding.text) in seen
    for section in sections(usual):
        for table in section.tables:
            for row in table.rows:
                assert all(piece.strip() in seen for cell in row for piece in cell.split("`")), (
                    table.caption,
                    row,
                )
    assert found.page.locator("svg.bar rect").count() > 0 and found.page.locator("path.line").count() > 0


def test_names_that_want_to_do_harm(opened: Callable[..., Opened]):
    """They are text; a dialogue or a request would be a complaint."""
    found = opened(report(hostile()))
    assert found.page.locator("img").count() == 0
    assert found.page.text_content("h1") == visible(HOSTILE, LINES)
    assert found.page.title().startswith(visible(HOSTILE, LINES)[:20])
    seen = found.page.locator("body").inner_text()
    assert not {character for character in seen if not character.isprintable()} - set("\n\t\xa0")
    place = found.page.evaluate("weft.place(5, (weft.view().start + weft.view().end) / 2)")
    box = found.page.locator("#canvas").bounding_box()
    found.page.mouse.move(box["x"] + place["x"], box["y"] + place["y"])
    found.press("ArrowDown", ".", ".", "Enter")
    assert found.page.locator("#tip *, #said *").count() == 0


def test_64000_spans_are_drawn_smoothly(opened: Callable[..., Opened]):
    """As few boxes as there are pixels, however many spans; nothing is measured."""
    spans = [
        Span(
            rank,
            "FB"[number % 2],
            number % 64,
            number * 1e-3,
            (number + 0.8) * 1e-3,
            rank,
            step=1 + number // 100,
        )
        for rank in range(16)
        for number in range(3950)
    ]
    steps = [
        Span(rank, "step", -1, n * 0.1, n * 0.1 + 0.0999, step=1 + n) for rank in range(16) for n in range(39)
    ]
    found = opened(report(replace(made(), timeline=Timeline([*spans, *steps]), steps={}, facts={})))
    found.press("Home")
    assert 0 < found.view()["drawn"] <= 16 * 1200
    found.page.evaluate("weft.setView(1000e6, 1100e6)")
    assert found.view()["drawn"] == pytest.approx(16 * 100, abs=32)
    assert found.page.evaluate("weft.idle()[0].idle") == pytest.approx(0.2, abs=1e-3)


def test_print_has_no_controls(opened: Callable[..., Opened], usual: Report):
    found = opened(usual)
    found.page.emulate_media(media="print")
    assert not found.page.is_visible("#bar") and not found.page.is_visible("nav")
    assert found.page.is_visible("#verdict") and found.page.is_visible("#parts table")
