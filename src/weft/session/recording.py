"""Tells the recorder of this rank: the executor's spans, the channel's messages, what happens between steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.config import Settings
from weft.launch.discovery import Place
from weft.profiler import clock
from weft.profiler.recorder import Recorder, clock_identity
from weft.session.session import Session
from weft.transport.channel import ABORT, BEGIN, KINDS, TELL, WHERE, Channel, Key

UNRECORDED = (ABORT, BEGIN, TELL, WHERE)
"""Messages that are told once for a call, or once for a step: they belong to no microbatch."""


def open_recorder(settings: Settings, place: Place) -> Recorder | None:
    """This rank's file, if the settings ask for one."""
    if not settings.record:
        return None
    return Recorder.open(Path(settings.record), place.rank, place.world_size)


def start(session: Session, recorder: Recorder | None, channel: Channel | None) -> None:
    """From now on ``recorder`` is told what this rank does. Ranks in its file are those of the job.

    ``channel``: that of the pipeline, if there is one.
    """
    session.recorder = recorder
    if recorder is None:
        return
    folder = Path(session.settings.record)
    session.clock = clock.keep(folder, session.rank, session.store, clock_identity())
    add, ranks = recorder.add, session.peers("pp")

    def span(kind: str, microbatch: int, start_s: float, end_s: float, peer: int, stage: int) -> None:
        add(kind, session.steps, microbatch, start_s, end_s, ranks[peer] if peer >= 0 else -1, stage=stage)

    def message(kind: str, peer: int, key: Key, start_s: float, end_s: float) -> None:
        if key.kind not in UNRECORDED:
            add(kind, key.step, key.microbatch, start_s, end_s, ranks[peer], KINDS[key.kind])

    if session.executor is not None:
        session.executor.hooks.record = span
    if channel is not None:
        channel.record = message


def stop(session: Session, channel: Channel | None) -> None:
    """Close the file."""
    recorder, session.recorder = session.recorder, None
    keeper, session.clock = session.clock, None
    if keeper is not None:
        keeper.close()
    if session.executor is not None:
        session.executor.hooks.record = None
    if channel is not None:
        channel.record = None
    if recorder is not None:
        recorder.close()


@contextmanager
def record(session: Session, kind: str, microbatch: int = -1) -> Iterator[None]:
    """Inside, time belongs to a span of its own."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        if session.recorder is not None:
            session.recorder.add(kind, session.steps, microbatch, start_s, time.perf_counter())


@contextmanager
def record_forward(session: Session, microbatch: int) -> Iterator[None]:
    """Inside, a microbatch of a rank without a pipeline: whatever is not its backward pass is its forward pass."""
    session.forward = (microbatch, time.perf_counter())
    try:
        yield
    finally:
        _end_forward(session)
        session.forward = None


@contextmanager
def record_backward(session: Session) -> Iterator[None]:
    """Inside, the backward pass of the microbatch that runs, on a rank without a pipeline."""
    if session.forward is None:
        yield
        return
    _end_forward(session)
    microbatch = session.forward[0]
    with record(session, "B", microbatch):
        yield
    session.forward = (microbatch, time.perf_counter())


def _end_forward(session: Session) -> None:
    if session.recorder is not None and session.forward is not None:
        microbatch, start_s = session.forward
        session.recorder.add("F", session.steps, microbatch, start_s, time.perf_counter())
