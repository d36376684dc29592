"""Ranks that resume together: an answer or a fault of one is everybody's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weft.checkpoint.agree import ask_first, choose, gather_faults
from weft.errors import CheckpointError

COUNT = 3


class Threads:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, barrier: threading.Barrier, texts: list[str]) -> None:
        self.rank, self.count = rank, COUNT
        self._barrier, self._texts = barrier, texts

    def gather(self, text: str) -> list[str]:
        self._texts[self.rank] = text
        self._barrier.wait(10)
        found = list(self._texts)
        self._barrier.wait(10)
        return found

    def broadcast(self, text: str) -> str:
        return self.gather(text)[0]


def on_all(call: Callable[[Threads], Any]) -> list[Any]:
    """What the call gives on each rank, or its error."""
    barrier, texts = threading.Barrier(COUNT), [""] * COUNT

    def one(rank: int) -> Any:
        try:
            return call(Threads(rank, barrier, texts))
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(one, range(COUNT)))


def test_faults_of_all_ranks_are_known_to_all():
    found = on_all(lambda ranks: gather_faults(ranks, ["shared", f"of {ranks.rank}"] if ranks.rank else []))
    assert found == [["shared", "of 1", "of 2"]] * COUNT


def test_the_first_rank_answers_for_all():
    asked = []
    assert (
        on_all(lambda ranks: ask_first(ranks, lambda: asked.append(ranks.rank) or [1, "a"]))
        == [[1, "a"]] * COUNT
    )
    assert asked == [0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CheckpointError("nothing there"), "nothing there"),
        (
            PermissionError(13, "Permission denied"),
            "the checkpoints cannot be looked through (Permission denied)",
        ),
    ],
)
def test_an_error_of_the_first_rank_is_raised_on_all(error, text):
    def fail() -> None:
        raise error

    found = on_all(lambda ranks: ask_first(ranks, fail))
    assert len(set(found)) == 1 and found[0].startswith(text)


def test_no_save_is_chosen_where_there_is_none(tmp_path):
    (tmp_path / "a_partial").mkdir()
    found = on_all(lambda ranks: choose(ranks, tmp_path, None, "full"))
    assert len(set(found)) == 1
    assert "a_partial/DONE is missing: this save was never completed" in found[0]
    assert found[0].endswith(f"There is no other one that is whole in {tmp_path}")
    missing = Path(tmp_path / "elsewhere")
    assert (
        on_all(lambda ranks: choose(ranks, missing, None, "full"))
        == [f"{missing} is no folder, so there is no checkpoint to resume from"] * COUNT
    )
