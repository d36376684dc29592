"""Processes looked at again and again, with a clock that the test turns."""

from __future__ import annotations

import os

import pytest

from weft.watch.files import file_waits
from weft.watch.files.file_waits import Look, Outside
from weft.watch.files.operation import Operation
from weft.watch.heartbeat import Page


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_operation_counts_from_when_it_was_first_seen():
    clock, shown = Clock(), [Operation("reads /x", "call 1")]
    one = Look(7, lambda pid: shown[0], clock)
    seen = {}
    for clock.now in range(12):
        if clock.now == 6:
            shown[0] = Operation("reads /x", "call 2")
        seen[clock.now] = one.observe(mark=max(0, clock.now - 8))
    assert [seen[at] for at in (0, 1)] == [("", 0.0)] * 2, (
        "a process that turned to something just now is left alone"
    )
    assert [seen[at] for at in (2, 5)] == [("reads /x", 0), ("reads /x", 3)]
    assert [seen[at] for at in (6, 8)] == [("reads /x", 0), ("reads /x", 2)], "another call"
    assert [seen[at] for at in (9, 10, 11)] == [("", 0.0)] * 3, "it gets on"


def test_it_looks_once_a_second():
    clock, looks = Clock(), []
    one = Look(7, lambda pid: looks.append(pid), clock)
    for clock.now in (tenth / 10 for tenth in range(50)):
        one.observe(None)
    assert len(looks) == 3


@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_that_shows_nothing_itself_is_seen_from_outside(joined: bool, monkeypatch: pytest.MonkeyPatch):
    clock, page, shown = Clock(), Page.private(1), [Operation("opens /x", "call")]
    monkeypatch.setattr(file_waits, "Look", lambda pid: Look(pid, lambda _: shown[0], clock))
    outside = Outside(page)
    if joined:
        page.slot(0).open(30.0, 600.0)
    for clock.now in range(5):
        outside.look(0, os.getpid())
    assert (page.sign(0).operation, page.sign(0).operation_s) == ("opens /x", 2.0)
    if joined:
        page.slot(0).beat()  # from now on it says so itself
    else:
        shown.clear()
        shown.append(None)  # type: ignore[arg-type]
    clock.now = 5
    outside.look(0, os.getpid())
    assert page.sign(0).operation == ""
