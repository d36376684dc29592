"""The page of a run as text; `tests/browser` opens it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import sys
from dataclasses import replace

import pytest

from tests.unit.report.run.reports import HOSTILE, hostile, made, report
from tests.unit.report.test_page import Parsed, data_of
from weft.analysis.analysis import Analysis
from weft.analysis.compare import compare
from weft.analysis.scaling import scale
from weft.errors import UsageError
from weft.report.run import page as page_file
from weft.report.run import step_tables
from weft.report.run.labels import sentence
from weft.report.run.lanes import lanes
from weft.report.run.page import run_page, sections
from weft.report.run.text import run_text
from weft.terminal_text import LINES, visible
from weft.timeline import Span, Timeline


def text_of(page: str) -> str:
    """What a reader sees without scripts."""
    parsed = Parsed(page)
    return " ".join(
        text for tag, texts in parsed.texts.items() if tag not in ("script", "style") for text in texts
    )


def test_a_policy_forbids_everything_but_the_page_itself():
    parsed = Parsed(run_page(report(made())))
    policy = next(
        a["content"] for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.split(None, 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    for name, source in (("style-src", parsed.texts["style"][0]), ("script-src", parsed.texts["script"][-1])):
        assert (
            rules.pop(name)
            == f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
        )
    assert not rules


def test_nothing_is_loaded_and_nothing_runs_but_the_script():
    for tag, attributes in Parsed(run_page(report(made()))).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "style"} & attributes.keys() and not any(name[:2] == "on" for name in attributes)
        assert attributes.get("href", "#")[0] == "#"


def test_names_from_outside_stay_text():
    """Nothing a name holds becomes an element or an attribute, and nothing that cannot be seen is in the text."""
    run = hostile()
    page = run_page(report(run))
    parsed = Parsed(page)
    assert "img" not in [tag for tag, _ in parsed.elements] and len(parsed.texts["script"]) == 2
    assert {name for _, attributes in parsed.elements for name in attributes} == {
        name for _, attributes in Parsed(run_page(report(made(steps=8)))).elements for name in attributes
    }
    assert parsed.texts["h1"] == [visible(HOSTILE, LINES)]
    seen = text_of(page)
    assert visible(HOSTILE) in seen
    assert not {character for character in seen if not character.isprintable()} - {"\n", "\t", "\xa0"}
    labels = data_of(page)["timelines"][1]["ranks"][0]["spans"]["labels"]
    assert any(label.startswith(HOSTILE) for label in labels)


def test_without_scripts_every_figure_is_there():
    found = report(made())
    page = run_page(found)
    seen = text_of(page)
    for finding in found.found:
        assert sentence(finding.text) in seen and all(
            str(value) in seen for value in finding.evidence.values()
        )
        for line in finding.advice:
            assert all(piece in seen for piece in line.split("`"))
    for section in sections(found):
        for table in section.tables:
            for row in table.rows:
                assert all(piece in seen for cell in row for piece in visible(cell).split("`")), (
                    table.caption,
                    row,
                )
    for row in step_tables.parts(found).rows:
        assert all(cell in seen for cell in row)


def test_every_section_has_its_heading_and_a_link_to_it():
    runs = [made(str(n), partitions=2, slow={}, replicas=n, units=False) for n in (1, 2)]
    old, new = map(Analysis, runs)
    page = run_page(report(runs[1], comparison=compare(old, new), scaling=scale([old, new])))
    ids = {attributes["id"] for tag, attributes in Parsed(page).elements if tag == "section"}
    assert ids == {
        "facts", "findings", "timeline", "compared", "scaling", "parts", "balance", "waits", "links", "steps",
        "memory", "system", "values",
    }  # fmt: skip
    links = {attributes["href"] for tag, attributes in Parsed(page).elements if tag == "a"}
    assert {f"#{name}" for name in ids} <= links


def test_findings_lead_to_their_step():
    found = report(made())
    links = [a for tag, a in Parsed(run_page(found)).elements if tag == "a" and "data-step" in a]
    assert [int(a["data-step"]) for a in links] == [found.step_of(finding) for finding in found.found]


def test_64000_spans_stay_under_two_megabytes():
    spans = [
        Span(rank, "FB"[number % 2], number % 64, number * 1e-3 + rank * 1e-7, (number + 0.83217) * 1e-3, rank,
             step=1 + number // 100)
        for rank in range(16)
        for number in range(4000)
    ]  # fmt: skip
    steps = [
        Span(rank, "step", -1, n * 0.1, n * 0.1 + 0.0999, step=1 + n) for rank in range(16) for n in range(40)
    ]
    run = replace(made(), timeline=Timeline([*spans, *steps]), steps={}, facts={})
    page = run_page(report(run))
    assert len(page.encode()) < 2_000_000
    held = sum(len(rank["spans"]["kind"]) for rank in data_of(page)["timelines"][-1]["ranks"])
    assert 62_000 < held <= 64_000 and "of 64,640 spans" in page


def test_many_ranks_have_fewer_steps_on_the_timeline(monkeypatch):
    monkeypatch.setattr(page_file, "MOST_BYTES", 300_000)
    found = report(made(replicas=4, microbatches=16))
    page = run_page(found)
    assert len(page.encode()) <= 300_000
    shown = [step for step, _ in lanes(found).steps]
    assert 1 < page.count("<option value=") - 1 < len(shown)


@pytest.mark.parametrize("seed", range(6))
def test_figures_that_make_no_sense_are_shown_all_the_same(seed: int):
    """What comes from damaged files: times far away, sizes below 0, what is not finite."""
    draw = random.Random(seed)
    times, sizes = [0.0, 1e-9, 1e15, -1e15, math.nan, math.inf, 5e-324], [0, 1, -1, 2**63]
    run = made(steps=draw.choice([1, 3, 8]))
    steps = {
        rank: tuple(
            replace(
                step, step_s=draw.choice(times), start_s=draw.choice(times), data_s=draw.choice(times),
                work_s=draw.choice(times), memory_bytes=draw.choice(sizes), values={"": draw.choice(times)},
            )
            for step in own
        )
        for rank, own in run.steps.items()
    }  # fmt: skip
    samples = tuple(
        replace(
            each, at_s=draw.choice(times), cores=draw.choice([(), (draw.choice(times),)]),
            memory_bytes=draw.choice(sizes), read_rate=draw.choice(times), devices=draw.choice([(), each.devices]),
        )
        for each in run.samples["node"]
    )  # fmt: skip
    found = report(replace(run, steps=steps, samples={"node": samples}, clock_error_s=draw.choice(times)))
    assert run_page(found) and run_text(found)


@pytest.mark.parametrize("timeline", [Timeline(), Timeline([Span(0, "F", 0, 0.0, 1.0)])])
def test_a_run_of_which_little_is_known(timeline: Timeline):
    run = replace(made(), timeline=timeline, facts={}, steps={}, samples={}, complete=False)
    page = run_page(report(run))
    assert "No rule found anything to mend." in page or "data-rule" in page
    assert json.dumps(data_of(page))


def test_dark_print_and_narrow_are_thought_of():
    style = Parsed(run_page(report(made()))).texts["style"][0]
    assert all(
        re.search(rf"@media \(?{words}", style)
        for words in ("prefers-color-scheme: dark", "print", "max-width")
    )


def test_without_jinja_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UsageError, match=r"pip install 'weft\[report\]', or leave out --html"):
        run_page(report(made()))
