"""What of a text is shown as it is, and that it is so wherever weft shows names."""

from __future__ import annotations

import logging

import pytest

from weft.report.shapes import text
from weft.report.text import table
from weft.terminal_text import LINES, keep_log_visible, visible
from weft.watch.failure import Failure
from weft.watch.heartbeat import Page, Sign

WRITTEN = {
    "a\x1b[2J": "a\\x1b[2J",
    "\u202egnp.exe": "\\u202egnp.exe",
    "\u2066a\u2069": "\\u2066a\\u2069",
    "\ud800": "\\ud800",
    "a\r\nb\tc\x9b": "a\\r\\nb\\tc\\x9b",
    "Grüße, 世界 ✓": "Grüße, 世界 ✓",
}


@pytest.mark.parametrize("given", WRITTEN)
def test_what_cannot_be_seen_is_written_out(given: str):
    assert visible(given) == WRITTEN[given]
    visible(given).encode()


def test_lines_may_stay():
    assert visible("a\tb\nc\x07", LINES) == "a\tb\nc\\x07"


@pytest.mark.parametrize("name", WRITTEN)
def test_names_are_shown_so_everywhere(name: str, caplog: pytest.LogCaptureFixture):
    written = WRITTEN[name]
    assert written in table(["unit"], [[name]])
    if not set(name) & set(LINES):
        assert written in text(name)
    page = Page.private(1)
    page.slot(0).open(1.0, 1.0)
    page.slot(0).note("forward", 1, 0, name)
    surrogate = "\ud800" in name  # the page holds UTF-8
    assert page.sign(0).module == ("?" if surrogate else written)
    assert Failure.of(ValueError(name), 0, Sign()).text == visible(name.replace("\n", " "))
    keep_log_visible()
    with caplog.at_level(logging.INFO, "weft"):
        logging.getLogger("weft").info("unit %s", name)
    assert caplog.messages[-1] == f"unit {visible(name, LINES)}"


def test_a_name_of_half_a_character_survives_in_failures():
    failure = Failure.of(ValueError("\ud800"), 0, Sign())
    assert Failure.from_json(failure.to_json()).text == "\\ud800"
