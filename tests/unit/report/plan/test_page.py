"""The page of a plan as text; `tests/browser` opens it."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from pathlib import Path

import pytest

from tests.unit.report.plan.answers import answered, hostile, nothing, single, usual
from tests.unit.report.run.reports import HOSTILE
from tests.unit.report.test_page import Parsed
from weft.cli.plan import text as plan_text
from weft.cli.plan.page import HOW_RIGHT, report_of
from weft.errors import UsageError
from weft.graph.sizes import Sizes
from weft.plan.parallelism import search
from weft.plan.parallelism.answer import Answer
from weft.report.plan.page import plan_page, sections
from weft.terminal_text import LINES, visible

DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture(scope="module")
def found() -> Answer:
    return usual()


def text_of(page: str) -> str:
    """What a reader sees."""
    parsed = Parsed(page)
    return " ".join(text for tag, texts in parsed.texts.items() if tag != "style" for text in texts)


def test_a_policy_forbids_everything_but_the_style(found):
    parsed = Parsed(plan_page(report_of(found)))
    policy = next(
        a["content"] for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    style = parsed.texts["style"][0]
    assert policy == (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"
    )


@pytest.mark.parametrize("make", [usual, nothing, single, hostile])
def test_nothing_is_loaded_and_nothing_runs(make):
    for tag, attributes in Parsed(plan_page(report_of(make()))).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "style"} & attributes.keys() and not any(name[:2] == "on" for name in attributes)
        assert attributes.get("href", "#")[0] == "#"


def test_names_from_outside_stay_text():
    page = plan_page(report_of(hostile()))
    parsed = Parsed(page)
    seen = text_of(page)
    assert visible(HOSTILE, LINES) in seen
    assert not {character for character in seen if not character.isprintable()} - {"\n", "\t", "\xa0"}
    assert {tag for tag, _ in parsed.elements} <= {
        tag for tag, _ in Parsed(plan_page(report_of(usual()))).elements
    }


def test_every_figure_is_there(found):
    report = report_of(found)
    seen = text_of(plan_page(report))
    tables = [report.best, report.of_kind, report.guide, *report.storage[1], *report.terms, report.machine]
    for table in tables:
        assert all(cell in seen for row in table.rows for cell in row), table.caption
    for words in (report.answer, report.write.command, report.storage[0], *report.how_right):
        assert words in seen
    assert f"weft.init({report.write.settings})" in seen


def test_every_section_has_its_heading_and_a_link_to_it(found):
    everything = {
        "best", "picture", "memory", "timeline", "try", "storage", "others", "terms", "assumptions", "right",
    }  # fmt: skip
    for answer, lacks in (
        (found, set()),
        (single(), {"timeline", "storage", "others"}),
        (nothing(), {"best", "picture", "timeline", "storage", "others", "terms"}),
    ):
        report = report_of(answer)
        parsed = Parsed(plan_page(report))
        ids = {attributes["id"] for tag, attributes in parsed.elements if tag == "section"}
        assert ids == {name for name, _ in sections(report)} == everything - lacks
        links = {attributes["href"] for tag, attributes in parsed.elements if tag == "a"}
        assert {f"#{name}" for name in ids} == links


def test_where_nothing_fits_the_page_says_what_is_lacking():
    report = report_of(nothing())
    seen = text_of(plan_page(report))
    assert re.search(r"Nothing fits: parameters, gradients and optimizer states alone take .* it lacks", seen)
    assert report.write is None and "weft run" not in seen and "nearest" in seen


def test_what_weft_does_not_run_is_told(monkeypatch):
    """Were the best schedule none of weft's, the command would be that of another plan."""
    why = "the schedule zb_h1 is not in weft"
    for module in (search, plan_text):
        monkeypatch.setattr(module, "cannot", lambda precision, one: why * (one.schedule == "zb_h1"))
    other = answered("8x8xH100", Sizes(96, 12288, 96, 49152, 50000, 2048), 1536)
    report = report_of(other)
    assert other.search.best[0].division.schedule == "zb_h1"
    seen = text_of(plan_page(report))
    assert f"weft cannot run the best one ({why})" in seen
    assert other.runs_today.division.schedule != "zb_h1"
    assert f"tensor_parallel_degree={other.runs_today.division.tensor}" in report.write.command
    assert "what weft runs today" in seen


def test_how_right_it_is_stands_in_the_docs():
    """The page's sentences have the figures of docs/planning.md, which benchmarks/plan measures."""
    text = " ".join((DOCS / "planning.md").read_text().split())
    part = text[text.index("### How right it is") : text.index("From Python:")]
    for sentence in HOW_RIGHT:
        figures = re.findall(r"\d[\d.]* [%G]\w*|\d{3}|[A-Z]+\d+\b", sentence)
        assert figures and all(figure in part for figure in figures), sentence


def test_without_jinja_the_extra_is_named(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        UsageError, match=r"page of a plan .* pip install 'weft\[report\]', or leave out --html"
    ):
        plan_page(report_of(found))
