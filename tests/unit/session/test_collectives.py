"""Texts over a port that only moves bytes: ranks are threads here, and the port is a list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from weft.errors import PeerError
from weft.session.collectives import agree_on, broadcast_text, gather_texts

RANKS = 3


class Threads:
    """The port of one rank; all ranks share the list of what was given."""

    def __init__(self, rank: int, given: list[bytes], barrier: threading.Barrier) -> None:
        self._rank, self._given, self._barrier = rank, given, barrier

    def broadcast_bytes(self, content: bytes, source: int) -> bytes:
        return self.gather_bytes(content)[source]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        self._given[self._rank] = content
        self._barrier.wait(30)
        found = list(self._given)
        self._barrier.wait(30)
        return found


def on_all_ranks(work: Callable[[int, Threads], Any]) -> list[Any]:
    """What each rank's work gives, or raises."""
    given, barrier = [b""] * RANKS, threading.Barrier(RANKS)
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, Threads(rank, given, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def session_of(rank: int, heard: list[str]) -> Any:
    def doing(what: str) -> Any:
        heard.append(what)
        return nullcontext()

    return SimpleNamespace(rank=rank, doing=doing)


def test_texts_arrive_in_the_order_of_ranks() -> None:
    assert on_all_ranks(lambda rank, port: gather_texts("é" * rank, port)) == [["", "é", "éé"]] * RANKS
    assert on_all_ranks(lambda rank, port: broadcast_text(str(rank), 1, port)) == ["1"] * RANKS


@pytest.mark.parametrize("text", ["", "!", "=", "a plan"])
def test_all_ranks_agree_on_the_first_one_s_text(text: str) -> None:
    heard: list[str] = []

    def work(rank: int, port: Threads) -> str:
        return agree_on(session_of(rank, heard), port, lambda: text if rank == 0 else "mine", "the plan")

    assert on_all_ranks(work) == [text] * RANKS
    assert heard == ["the plan"] * RANKS


def test_an_error_of_the_first_rank_is_heard_by_all() -> None:
    def fail() -> str:
        raise ValueError("no unit")

    first, *others = on_all_ranks(lambda rank, port: agree_on(session_of(rank, []), port, fail, "the plan"))
    assert isinstance(first, ValueError) and str(first) == "no unit"
    assert all(isinstance(error, PeerError) and error.rank == 0 for error in others)
    assert {error.text for error in others} == {"ValueError: no unit"}
