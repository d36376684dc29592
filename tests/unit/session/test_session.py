"""A session is asked to change, and tells the monitor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.config import Settings
from weft.errors import UsageError
from weft.launch.discovery import Place
from weft.session.session import JUDGE_S, Session
from weft.topology.mesh import Mesh


class Notes:
    """A monitor that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def note(self, phase: str, step: int, microbatch: int | None, what: str | None) -> None:
        self.told.append((phase, step, what))

    def count_evaluations(self, count: int, evaluates: bool) -> None:
        self.told.append((count, evaluates))

    def locate(self, error: BaseException) -> None:
        self.told.append(error)


def make(rank: int = 2) -> tuple[Session, list[Any]]:
    notes: Any = Notes()
    settings = Settings(partitions=2)
    place = Place(rank=rank, world_size=4)
    return Session(settings=settings, place=place, mesh=Mesh(4, 2), monitor=notes), notes.told


def test_a_rank_knows_its_place_on_the_mesh() -> None:
    session, _ = make(rank=2)
    assert (session.rank, session.position("pp"), session.position("rdp")) == (2, 0, 1)
    assert session.peers("pp") == (2, 3) and session.peers("rdp") == (0, 2)
    assert session.timeout.total_seconds() == session.settings.wait_timeout + JUDGE_S


def test_what_it_does_is_told_and_taken_back() -> None:
    session, told = make()
    with session.doing("outer"), session.doing("inner"):
        pass
    assert [what for _, _, what in told] == ["outer", "inner", "outer", None]


def test_collectives_in_a_rehearsal_are_refused() -> None:
    session, _ = make()
    with session.rehearsing():
        assert session.tracing and session.in_step
        with pytest.raises(UsageError, match=r"^barrier\(\) was called inside a weft.step function"):
            session.check_outside("barrier()")
    session.check_outside("barrier()")


def test_a_rehearsal_that_fails_is_over_too() -> None:
    session, _ = make()
    with pytest.raises(KeyError), session.rehearsing():
        raise KeyError
    assert not session.tracing


def test_steps_are_counted_and_those_that_only_evaluate_apart() -> None:
    session, told = make()
    for evaluates in (False, True, False):
        session.count_step(evaluates)
    assert (session.steps, session.evaluations) == (3, 1)
    assert told == [(0, False), (1, True), (1, False)]


def test_after_a_failed_step_none_runs() -> None:
    session, told = make()
    session.check_whole()
    error = ValueError("mine")
    session.break_off(error)
    assert told == [error]
    with pytest.raises(UsageError, match="cannot go on after a failed step: ValueError: mine"):
        session.check_whole()


def test_other_settings_forget_the_schedule() -> None:
    session, _ = make()
    chosen: Any = object()
    watch: Any = object()
    session.decided.use_schedule(chosen, watch)
    session.decided.use_schedule(chosen)
    assert session.decided.watch is watch, "a schedule that takes over is still watched"
    session.executor = executor = SimpleNamespace(wait_timeout_s=0.0)  # type: ignore[assignment]
    session.use_settings(Settings(partitions=2, wait_timeout=9.0))
    assert session.decided.chosen is None and session.decided.watch is None
    assert executor.wait_timeout_s == 9.0 + JUDGE_S
