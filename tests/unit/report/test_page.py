"""The page as text; `tests/browser` opens it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.timelines import STEP
from weft.report.embedded import embed
from weft.report.page import Entry, page
from weft.report.styles import STYLES
from weft.terminal_text import visible
from weft.timeline import KINDS, Span, Timeline

HOSTILE = "</script><script>alert('x')</script><!-- {{data}} \"&\x00 \u2028"


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.texts.setdefault(tag, []).append("")
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def test_a_policy_forbids_everything_but_the_page_itself():
    parsed = Parsed(page("a step", [Entry("recorded", STEP)]))
    policy = next(
        a["content"] for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.split(None, 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    for name, source in (("style-src", parsed.texts["style"][0]), ("script-src", parsed.texts["script"][-1])):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert rules.pop(name) == f"'sha256-{digest}'"
    assert not rules


def test_nothing_is_loaded_from_anywhere():
    parsed = Parsed(page("a step", [Entry("recorded", STEP)]))
    for tag, attributes in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "href", "style"} & attributes.keys() and not any(
            name[:2] == "on" for name in attributes
        )
    for name in ("style", "script"):
        assert not re.search(
            r"https?:|//\w+\.\w|@import|url\(|fetch|XMLHttp|innerHTML", "".join(parsed.texts[name])
        )


def test_text_from_outside_stays_text():
    timeline = Timeline([Span(0, "F", 0, 0.0, 1.0, label=HOSTILE)])
    text = page(HOSTILE, [Entry(HOSTILE, timeline)])
    plain = page("x", [Entry("y", Timeline([Span(0, "F", 0, 0.0, 1.0)]))])
    parsed = Parsed(text)
    assert [tag for tag, _ in parsed.elements] == [tag for tag, _ in Parsed(plain).elements]
    assert parsed.texts["h1"] == [visible(HOSTILE)]
    assert data_of(text)["timelines"][0]["name"] == HOSTILE
    assert data_of(text)["timelines"][0]["ranks"][0]["spans"]["labels"] == [HOSTILE]


@settings(deadline=None)
@given(
    st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_embedded_json_has_no_markup_and_gives_the_same_value(value):
    text = embed(value)
    assert "<" not in text and text.isascii() and json.loads(text) == value


def test_the_data_are_the_spans():
    content = data_of(page("a step", [Entry("planned", STEP.shifted(7.0)), Entry("recorded", STEP)]))
    assert [kind["kind"] for kind in content["kinds"]] == list(STYLES)
    names = [*STYLES, "step"]
    for timeline, name in zip(content["timelines"], ("planned", "recorded"), strict=True):
        assert (timeline["name"], timeline["length"]) == (name, 20_500_000)
        for rank in timeline["ranks"]:
            columns = rank["spans"]
            start, step = ([*accumulate(columns[name])] for name in ("start", "step"))
            end = [sum(pair) for pair in zip(start, columns["duration"], strict=True)]
            found = [
                (names[kind], microbatch, start, end, stage, columns["labels"][label], step)
                for kind, microbatch, stage, label, start, end, step in zip(
                    *(columns[key] for key in ("kind", "microbatch", "stage", "label")),
                    start,
                    end,
                    step,
                    strict=True,
                )
            ]
            assert found == [
                (s.kind, s.microbatch, round(s.start_s * 1e9), round(s.end_s * 1e9), s.stage, s.label, s.step)
                for s in STEP.of_rank(rank["rank"])
            ]


def test_the_table_has_the_figures_of_the_timeline():
    text = page("a step", [Entry("recorded", STEP)])
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    assert rows[0] == [
        "rank",
        "idle",
        "work ms",
        *(f"{html.escape(style.name)} ms" for style in STYLES.values()),
    ]
    for row, rank in zip(rows[1:3], (0, 1), strict=True):
        assert row[:3] == [f"rank {rank}", f"{STEP.idle_share(rank):.1%}", f"{STEP.busy_s(rank) * 1e3:.3f}"]
    assert rows[1][3:5] == ["4.000", "7.000"] and rows[2][3:7] == ["4.500", "0.000", "5.000", "3.000"]
    assert rows[3][:2] == ["bubble", f"{STEP.bubble:.1%}"]
    assert "<b>recorded</b>: 2 ranks, 20.500 ms, bubble " in text


@pytest.mark.parametrize(("ranks", "is_open"), [(1, True), (8, True), (9, False)])
def test_a_long_table_is_folded(ranks: int, is_open: bool):
    timeline = Timeline([Span(rank, "F", 0, 0.0, 1.0) for rank in range(ranks)])
    assert ('<details id="figures" open>' in page("x", [Entry("y", timeline)])) == is_open


def test_empty_timelines():
    assert data_of(page("", []))["timelines"] == []
    assert data_of(page("", [Entry("nothing", Timeline())]))["timelines"][0]["ranks"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_legend_has_what_is_there(kind: str):
    text = page("x", [Entry("y", Timeline([Span(0, kind, 0, 0.0, 1.0)]))])
    legend = re.search(r'<ul id="legend".*?</ul>', text, re.S)[0]
    names = [STYLES[kind].name, "idle"] if kind in STYLES else ["idle"]
    assert re.findall(r"<span>(.*?)</span>", legend) == names
