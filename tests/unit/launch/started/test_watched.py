"""Streams of changes: which are begun again, which are given up, and when it is time to ask."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import pytest

from weft.launch.started import watched
from weft.launch.started.watched import Watched


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "LEAST_S", 0.01)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_is_asked_after_changes_only():
    changes: queue.Queue[object] = queue.Queue()
    changes.put(1)
    found = Watched([lambda: iter(changes.get, None)])
    until(lambda: found.streaming)
    until(found.due)
    until(lambda: not found.due())
    changes.put(2)
    found.wait(30)
    assert found.due() and not found.due()
    changes.put(None)  # the stream ends, and is begun again: something may have been missed
    until(found.due)
    changes.put(3)
    until(lambda: found.streaming)
    found.close()
    changes.put(4)


def test_a_stream_that_fails_three_times_in_a_row_is_given_up():
    begun: list[int] = []

    def stream() -> Iterator[object]:
        begun.append(1)
        yield 1
        raise OSError("refused")

    found = Watched([stream])
    until(lambda: len(begun) == 3)
    time.sleep(0.1)
    assert len(begun) == 3 and not found.streaming
    assert found.due() and found.due()


def test_it_is_asked_now_and_then_though_nothing_is_told(monkeypatch: pytest.MonkeyPatch):
    changes: queue.Queue[object] = queue.Queue()
    changes.put(1)
    found = Watched([lambda: iter(changes.get, None)])
    until(lambda: found.streaming)
    until(lambda: not found.due())
    monkeypatch.setattr(watched, "AGAIN_S", 0.0)
    time.sleep(0.01)
    assert found.due()
    found.close()
    changes.put(2)
