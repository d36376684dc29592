"""Passes on to this rank's recorder: the executor's spans, the channel's messages, what happens between steps."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weft.config import Settings
from weft.errors import UsageError
from weft.launch.discovery import Place
from weft.session.session import Session
from weft.session.state import Process
from weft.transport.channel import ABORT, BEGIN, KINDS, SPEC, WHERE, Channel, Key
from weft.watch.process import host_name

if TYPE_CHECKING:
    from weft.analysis.run import Unit
    from weft.plan.measured.planned import Planned
    from weft.profiler.device import Moment
    from weft.profiler.recorder import Recorder

_log = logging.getLogger("weft")
UNRECORDED = (ABORT, BEGIN, SPEC, WHERE)
"""Messages that are sent once for a call, or once for a step: they belong to no microbatch."""
LEAST_S = 100e-6
"""Seconds; a shorter preparation is not recorded."""


def open_recorder(settings: Settings, place: Place) -> Recorder | None:
    """This rank's files, if the settings ask for them."""
    if not settings.record:
        return None
    from weft.profiler.clock import Clock  # here: most jobs record nothing, and need not load the profiler
    from weft.profiler.detail import Control, parse_detail
    from weft.profiler.recorder import Recorder
    from weft.profiler.steps import Book

    folder, clock = Path(settings.record).absolute(), Clock.here()  # the script may change its folder
    recorder = Recorder.open(folder, place.rank, place.world_size, clock)
    recorder.book = Book.open(folder, place.rank, place.world_size, clock)
    recorder.detail, recorder.control = parse_detail(settings.record_steps), Control(folder)
    return recorder


def start(
    session: Session, recorder: Recorder | None, channel: Channel | None, process: Process | None = None
) -> None:
    """From now on ``recorder`` gets what this rank does. Ranks in its files are those of the job.

    ``channel``: that of the pipeline, if there is one. ``process``: as it was, if not given.
    """
    session.recorder = recorder
    session.monitor.recording = None if recorder is None else recorder.folder
    if recorder is None:
        return
    from weft.profiler.clock import clock_identity
    from weft.profiler.host import clocks, pauses, script_lines
    from weft.profiler.host.child import start_sampler

    recorded = session.recorded
    recorded.recordings += 1
    recorded.clock = clocks.keep(
        recorder.folder, session.rank, session.store, clock_identity(), recorded.recordings
    )
    add, ranks = recorder.add, session.peers("pp")

    def span(kind: str, microbatch: int, start_s: float, end_s: float, peer: int, stage: int) -> None:
        if kind != "step":  # which is longer for the session than for the executor
            add(
                kind, session.steps, microbatch, start_s, end_s, ranks[peer] if peer >= 0 else -1, stage=stage
            )

    def message(kind: str, peer: int, key: Key, start_s: float | Moment, end_s: float) -> None:
        if key.kind not in UNRECORDED:
            add(kind, key.step, key.microbatch, start_s, end_s, ranks[peer], KINDS[key.kind])

    if session.executor is not None:
        session.executor.hooks.record = span
    if channel is not None:
        channel.record, channel.moment = message, recorder.moment
    process = recorded.process = process or recorded.process
    record_rank(session)
    if process.make_event is not None:
        recorder.use_events(process.make_event, process.captures)
    recorder.undo = [
        pauses.watch(session),
        script_lines.watch(recorder, session.rank),
        *process.observe(session),
    ]
    if session.place.local_rank == 0:
        recorder.undo.append(start_sampler(recorder.folder))


def change(session: Session, settings: Settings, channel: Channel | None) -> None:
    """Record as other settings say, from now on."""
    before, recorder = session.settings, session.recorder
    same = recorder is not None and settings.record and Path(settings.record).absolute() == recorder.folder
    if settings.record != before.record and not same:
        made = open_recorder(settings, session.place)  # or not: then all stays as it was
        stop(session, channel)
        start(session, made, channel)
    elif recorder is not None and settings.record_steps != before.record_steps:
        from weft.profiler.detail import parse_detail

        recorder.detail = parse_detail(settings.record_steps)


def record_rank(session: Session) -> None:
    """Write what this rank is, with the units of its models, once they are split."""
    recorder, recorded, process = session.recorder, session.recorded, session.recorded.process
    if recorder is None:
        return
    from weft.analysis.run import Facts
    from weft.profiler.facts import process_start_s, write_facts

    if recorder.book is not None:
        recorder.book.cpu_s = process.cpu_s
    facts = recorder.facts or Facts(
        session.rank, session.place.world_size, host_name(), os.getpid(), session.position("pp"),
        session.position("rdp"), process.device, process_start_s(), recorded.joined_s, process.limit_bytes,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        versions=process.versions,
    )  # fmt: skip
    given = {**recorded.found, **asdict(session.settings)}
    recorder.facts = replace(
        facts,
        settings=given,
        units=tuple(recorded.units),
        planned=recorded.planned,
        base_bytes=process.base_bytes,
    )
    write_facts(recorder.folder, recorder.facts, recorder.clock)


def record_units(session: Session, units: Iterable[Unit], measured: bool = False) -> None:
    """A model was split into these units; recordings that begin later have them, too.

    ``measured``: their costs were, here, with a microbatch of this job.
    """
    session.recorded.units += units
    record_facts(session, measured_costs=measured)


def record_plan(session: Session, planned: Planned | None) -> None:
    """Of a step so much is expected from now on; recordings that begin later have it, too."""
    session.recorded.planned = planned
    record_facts(session)


def record_facts(session: Session, **found: object) -> None:
    """Adds facts that a frontend found of the run to the recording, beside its settings: rules read them."""
    session.recorded.found |= found
    try:
        record_rank(session)
    except UsageError as error:  # the recording is the worse for it, the training is not
        _log.warning("the recording does not have all of the run: %s", error)


def stop(session: Session, channel: Channel | None) -> None:
    """Close the files."""
    recorder, session.recorder = session.recorder, None
    session.monitor.recording = None
    keeper, session.recorded.clock = session.recorded.clock, None
    if keeper is not None:
        keeper.close()
    for undo in () if recorder is None else recorder.undo:
        undo()
    if session.executor is not None:
        session.executor.hooks.record = None
    if channel is not None:
        channel.record, channel.moment = None, time.perf_counter
    if recorder is not None:
        failed = session.broken or getattr(sys, "last_value", None) is not None
        recorder.close(ended=not failed)


class Spanned(Protocol):
    """Whose spans are recorded: a session, of which this uses so much."""

    recorder: Recorder | None
    steps: int


@contextmanager
def record(session: Spanned, kind: str, microbatch: int = -1, peer: int = -1) -> Iterator[None]:
    """Inside, time belongs to a span of its own."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        if session.recorder is not None:
            session.recorder.add(kind, session.steps or -1, microbatch, start_s, time.perf_counter(), peer)


@contextmanager
def record_outermost(session: Session, kind: str) -> Iterator[None]:
    """As `record`, unless time belongs to a span of that kind already."""
    recorder = session.recorder
    if recorder is None or kind in recorder.inside:
        yield
        return
    recorder.inside.add(kind)
    try:
        with record(session, kind):
            yield
    finally:
        recorder.inside.discard(kind)


@contextmanager
def record_first(session: Session) -> Iterator[None]:
    """Inside, the ranks of a pipeline wait for the first one, which begins the step."""
    if session.position("pp") == 0:
        yield
        return
    with record(session, "wait", peer=session.peers("pp")[0]):
        yield


@contextmanager
def record_step(session: Session, size: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Inside, a step is called; it has a span if it gets so far as to be counted.

    ``size``: the samples of its mini-batch on this rank, and the bytes of memory in use, asked at its end.
    """
    recorder = session.recorder
    if recorder is None:
        yield
        return
    before = session.steps
    recorder.open_step()
    try:
        yield
    finally:
        if session.steps == before:
            recorder.drop_step()
        elif session.recorder is recorder:
            recorder.end_step(*size())


@contextmanager
def record_preparation(session: Session) -> Iterator[None]:
    """Inside, models are split, steps compared or memory put in order, before a step. Moments are not recorded."""
    start_s = time.perf_counter()
    if session.recorder is not None:
        session.recorder.open_step()
    try:
        yield
    except BaseException:
        if session.recorder is not None:
            session.recorder.drop_step()
        raise
    finally:
        end_s = time.perf_counter()
        if session.recorder is not None and end_s - start_s >= LEAST_S:
            session.recorder.add("prepare", session.steps + 1, -1, start_s, end_s)


@contextmanager
def record_forward(session: Session, microbatch: int) -> Iterator[None]:
    """Inside, a microbatch of a rank without a pipeline: whatever is not its backward pass is its forward pass."""
    session.recorded.forward = (microbatch, time.perf_counter())
    try:
        yield
    finally:
        _end_forward(session)
        session.recorded.forward = None


@contextmanager
def record_backward(session: Session) -> Iterator[None]:
    """Inside, the backward pass of the microbatch that runs, on a rank without a pipeline."""
    if session.recorded.forward is None:
        yield
        return
    _end_forward(session)
    microbatch = session.recorded.forward[0]
    with record(session, "B", microbatch):
        yield
    session.recorded.forward = (microbatch, time.perf_counter())


def _end_forward(session: Session) -> None:
    if session.recorder is not None and session.recorded.forward is not None:
        microbatch, start_s = session.recorded.forward
        session.recorder.add("F", session.steps, microbatch, start_s, time.perf_counter())
