"""Ranks that are asked to end agree on a step, with few looks."""

from __future__ import annotations

import os
import signal
from mmap import mmap
from types import SimpleNamespace
from typing import Any

import pytest

from weft.checkpoint.stop import Stop
from weft.watch.job_header import Course


class Ranks:
    """One rank of some; the others say what `others` gives."""

    def __init__(self, count: int, others: list[str] | None = None) -> None:
        self.rank, self.count, self.others, self.looks = 0, count, others or [], 0

    def gather(self, text: str) -> list[str]:
        self.looks += 1
        return [text, *self.others]

    def broadcast(self, text: str) -> str:
        return text


def job(launched: bool) -> Any:
    place = SimpleNamespace(shared_fd=3 if launched else None)
    return SimpleNamespace(place=place, monitor=SimpleNamespace(course=Course(mmap(-1, 4096))))


def test_looks_are_a_second_apart():
    now = 0.0
    ranks = Ranks(2, ["[false, 1]"])
    stop = Stop(job(True), ranks, lambda: now)
    looked = []
    for step in range(1, 601):
        now += 0.01
        before = ranks.looks
        assert not stop.after_step()
        if ranks.looks > before:
            looked.append(step)
    assert looked[:7] == [1, 3, 7, 15, 31, 63, 127]
    assert 95 <= looked[8] - looked[7] <= 100


def test_long_steps_are_each_looked_at():
    now = 0.0
    ranks = Ranks(2, ["[false, 1]"])
    stop = Stop(job(True), ranks, lambda: now)
    for _ in range(10):
        now += 5.0
        stop.after_step()
    assert ranks.looks == 10


def test_any_rank_may_be_asked():
    stop = Stop(job(True), Ranks(3, ["[false, 9]", "[true, 9]"]), lambda: 0.0)
    assert stop.after_step()


def test_the_launcher_asks_by_the_page():
    here = job(True)
    stop = Stop(here, Ranks(1))
    stop.open()
    assert here.monitor.course.heeded and not stop.after_step()
    here.monitor.course.asked = 1
    assert stop.after_step()
    stop.close()
    assert not here.monitor.course.heeded


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_where_no_launcher_does(number: int):
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        stop = Stop(job(False), Ranks(1))
        stop.open()
        assert not stop.after_step()
        os.kill(os.getpid(), number)
        assert stop.after_step() and not heard
        os.kill(os.getpid(), number)  # the second time it does what it did before
        assert heard == [number]
        stop.close(ends=True)
        os.kill(os.getpid(), number)
        assert heard == [number] * 2
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        stop = Stop(job(False), Ranks(1))
        stop.open()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        stop.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
