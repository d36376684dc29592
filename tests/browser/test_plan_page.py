"""The page of a plan in headless Chromium, which the network is taken from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.opened import Opened
from tests.browser.test_run_page import rows
from tests.long import one_in
from tests.unit.report.plan.answers import hostile, nothing, single, usual
from tests.unit.report.run.reports import HOSTILE
from weft.cli.plan.page import report_of
from weft.cli.plan.text import as_json
from weft.plan.parallelism.answer import Answer
from weft.report.plan.page import plan_page
from weft.terminal_text import LINES, visible
from weft.units import format_bytes, format_seconds


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    pages: list[Opened] = []

    def open_page(of: Answer, **more: Any) -> Opened:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_text(plan_page(report_of(of)), encoding="utf-8")
        pages.append(Opened(browser, path, **more))
        return pages[-1]

    yield open_page
    for one in pages:
        one.close()


@pytest.fixture(scope="module")
def found() -> Answer:
    return usual()


def boxes(page: Opened, selector: str) -> list[dict[str, float]]:
    """Where elements are, in pixels: their middles and widths."""
    return page.page.eval_on_selector_all(
        selector,
        """all => all.map(e => { const r = e.getBoundingClientRect();
        return {x: r.left + r.width / 2, y: r.top + r.height / 2, width: r.width}; })""",
    )


def test_figures_are_those_of_the_answer(opened: Callable[..., Opened], found: Answer):
    answer = as_json(found)
    page = opened(found)
    best = rows(page, "best")
    assert [row[2] for row in best] == [format_seconds(plan["step_s"]) for plan in answer["best"]]
    assert [row[5] for row in best] == [format_bytes(plan["memory_bytes"]) for plan in answer["best"]]
    assert [row[7] for row in best] == [f"{plan['cost']:,.0f}" for plan in answer["best"]]
    assert {row[0]: row[2] for row in rows(page, "picture")} == {
        kind: format_seconds(plan["step_s"]) for kind, plan in answer["of_kind"].items()
    }
    assert [row[4] for row in rows(page, "try")] == [
        format_seconds(each["step_s"]) for each in answer["guide"]
    ]
    settings = page.page.text_content("#settings")
    assert settings == f"weft.init({answer['runs_today']['settings']})"
    for name, value in answer["runs_today"]["settings"].items():
        assert f"--set {name}={str(value).lower() if isinstance(value, bool) else value}" in (
            page.page.text_content("#command")
        )


def test_points_are_as_far_apart_as_their_figures(opened: Callable[..., Opened], found: Answer):
    page = opened(found)
    points = boxes(page, "#picture .field circle.best")
    plans = found.search.best
    for first, other, plan in zip(points[:-1], points[1:], plans[1:], strict=True):
        assert other["x"] >= first["x"] - 0.1, plan
    near, far = points[0], boxes(page, "#picture .field rect.of-kind")
    slowest = max(found.search.of_kind.values(), key=lambda plan: plan.seconds)
    expected = (plans[-1].seconds - plans[0].seconds) / (slowest.seconds - plans[0].seconds)
    reached = (points[-1]["x"] - near["x"]) / (max(box["x"] for box in far) - near["x"])
    assert reached == pytest.approx(expected, abs=0.02)
    limit = boxes(page, "#picture .field line.limit")[0]["y"]
    assert all(point["y"] > limit for point in [*points, *far])


def test_bars_are_as_long_as_their_memory(opened: Callable[..., Opened], found: Answer):
    page = opened(found)
    bars = page.page.eval_on_selector_all(
        "#memory svg.bar",
        "all => all.map(s => [...s.querySelectorAll('rect')].map(r => r.getBoundingClientRect().width))",
    )
    whole = boxes(page, "#memory svg.bar")[0]["width"]
    plans = sorted(found.search.of_kind.values(), key=lambda plan: plan.seconds)
    for bar, plan in zip(bars, plans, strict=True):
        memory = plan.memory
        parts = (
            memory.parameters, memory.gradients, memory.states, memory.activations, memory.moment, memory.reserved,
        )  # fmt: skip
        expected = [whole * part / found.asked.limit_bytes for part in parts if part]
        assert bar == pytest.approx(expected, abs=0.5)


def test_lanes_have_every_box(opened: Callable[..., Opened], found: Answer):
    page = opened(found)
    ranks, stages = found.search.best[0].division.pipeline, found.search.best[0].division.stages
    counts = page.page.eval_on_selector_all(
        "#timeline svg.lane", "all => all.map(s => s.querySelectorAll('rect').length)"
    )
    report = report_of(found)
    assert counts == [len(lane.boxes) for lane in report.pipeline.lanes] and len(counts) == ranks
    forward = page.page.locator("#timeline svg.lane rect[fill='url(#part-F)']").count()
    assert forward == 16 * stages


@pytest.mark.parametrize(
    ("scheme", "width"), one_in(6, itertools.product(["light", "dark"], [1280, 380, 320]))
)
def test_the_page_never_scrolls_to_the_side(
    opened: Callable[..., Opened], found: Answer, width: int, scheme: str
):
    for of in (found, nothing(), single(), hostile()):
        page = opened(of, width=width, scheme=scheme)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", one_in(3, [1280, 800, 380]))
def test_labels_can_be_read(opened: Callable[..., Opened], found: Answer, width: int):
    """No label lies over another one, and all are in the field."""
    for of in (found, single()):
        page = opened(of, width=width)
        texts = page.page.eval_on_selector_all(
            "#picture .field text:not(.limit-text)",
            "all => all.map(e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; })",
        )
        assert texts
        for place, one in enumerate(texts):
            assert one[0] >= 0 and one[2] <= width
            for other in texts[:place]:
                apart = (
                    one[2] <= other[0]
                    or other[2] <= one[0]
                    or one[3] <= other[1] + 3
                    or other[3] <= one[1] + 3
                )
                assert apart, (one, other)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(opened: Callable[..., Opened], found: Answer, scheme: str):
    """At least 4.5 to 1 between text and the ground that it stands on, as WCAG 2 asks for."""
    page = opened(found, scheme=scheme)
    ratios = page.page.evaluate(
        """() => {
        const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        const light = (css) => { const [r, g, b] = css.match(/[\\d.]+/g).map(Number);
          return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
        const ground = (e) => { for (; e; e = e.parentElement) {
            const found = getComputedStyle(e).backgroundColor;
            if (!/, 0\\)$/.test(found) && found !== "transparent") return light(found); } };
        const texts = "p, td, th, h1, h2, li, a, code, figcaption, caption, .name, .total, .sides span, .tops span";
        return [...document.querySelectorAll(texts)].map((e) => {
          const text = light(getComputedStyle(e).color), below = ground(e);
          return [(Math.max(text, below) + 0.05) / (Math.min(text, below) + 0.05), e.className || e.tagName];
        }); }"""
    )
    assert ratios and min(ratios)[0] >= 4.5, min(ratios)


def test_without_scripts_everything_is_there(opened: Callable[..., Opened], found: Answer):
    report = report_of(found)
    with_scripts, without = opened(found), opened(found, scripts=False)
    seen = " ".join(without.page.locator("body").inner_text().split())
    assert seen == " ".join(with_scripts.page.locator("body").inner_text().split())
    assert report.answer in seen and report.pipeline.note in seen
    for table in (report.best, report.of_kind, report.guide, *report.terms):
        assert all(cell in seen for row in table.rows for cell in row)
    assert without.page.locator("script").count() == 0


def test_names_that_want_to_do_harm(opened: Callable[..., Opened]):
    """They are text; a dialogue or a request would be a complaint."""
    page = opened(hostile())
    assert page.page.locator("img, script").count() == 0
    assert visible(HOSTILE, LINES) in page.page.locator("header").text_content()
    seen = page.page.locator("body").inner_text()
    assert not {character for character in seen if not character.isprintable()} - set("\n\t\xa0")


def test_where_nothing_fits(opened: Callable[..., Opened]):
    found = nothing()
    page = opened(found)
    assert page.page.locator("#answer.CRITICAL").count() == 1 and page.page.locator("#command").count() == 0
    bar, limit = boxes(page, "#memory svg.bar rect")[0], boxes(page, "#memory line.limit")[0]
    last = boxes(page, "#memory svg.bar rect")[-1]
    assert bar["x"] < limit["x"] < last["x"], "the limit lies within the bar"


def test_print_has_everything_but_links(opened: Callable[..., Opened], found: Answer):
    page = opened(found)
    page.page.emulate_media(media="print")
    assert not page.page.is_visible("nav")
    for shown in ("#answer", "#best table", "#picture .field", "#memory .bar", "#timeline .lane", "#right"):
        assert page.page.locator(shown).first.is_visible(), shown
