"""Collections become spans, if they take long enough."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest

from weft.profiler.host import pauses


class Recorder:
    def __init__(self) -> None:
        self.spans: list[tuple[object, ...]] = []

    def add(self, *span: object) -> None:
        self.spans.append(span)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch):
    return SimpleNamespace(recorder=Recorder(), steps=3, __hash__=None)


def test_long_collections_become_spans(session, monkeypatch):
    times = iter([10.0, 10.5, 20.0, 20.00005, 30.0, 30.5])
    undo = pauses.watch(session)
    watch = gc.callbacks[-1]
    monkeypatch.setattr(pauses, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    gc.disable()
    try:
        for phase in ("start", "stop", "start", "stop"):
            watch(phase, {})
        session.recorder, seen = None, session.recorder
        watch("start", {})
        watch("stop", {})
    finally:
        gc.enable()
        undo()
    assert seen.spans == [("collector", 3, -1, 10.0, 10.5)]
    assert watch not in gc.callbacks


def test_a_forked_process_has_no_part_in_the_recording(session):
    undo = pauses.watch(session)
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if session.recorder is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert session.recorder is not None
    finally:
        undo()
