"""What ranks leave in the job's store when they have met to save: nothing that grows."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from weft.checkpoint.meeting import Meeting
from weft.watch.heartbeat import Sign, State


def made(store: HashStore, name: str, rank: int, optional: tuple[int, ...] = ()) -> Meeting:
    step = int(name.partition(".")[0])
    signs = {other: Sign(state=State.RUNNING, step=step) for other in range(3)}
    return Meeting(store, name, rank, (0, 1), optional, step, lambda: signs, "save_checkpoint()", 20.0)


def a_save(store: HashStore, name: str, rank: int) -> None:
    one = made(store, name, rank)
    one.arrive("{}")
    if one.leads:
        one.begin({"ranks": [0, 1]})
    one.report("{}")
    if one.leads:
        one.reports([0, 1])
        one.end({})
    else:
        one.ended()
    one.part()


def together(*work) -> None:
    threads = [threading.Thread(target=part) for part in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def new_store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def test_a_save_leaves_one_key_for_all_saves():
    store = new_store()
    counts = []
    for step in range(5):
        together(*(lambda rank=rank, step=step: a_save(store, f"{step}.0", rank) for rank in range(2)))
        counts.append(store.num_keys())
    assert counts == [counts[0]] * 5 and counts[0] <= 2, counts  # torch counts one more


def test_a_rank_that_comes_when_all_is_over_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    store = new_store()
    together(*(lambda rank=rank: a_save(store, "3.0", rank) for rank in range(2)))
    before = store.num_keys()
    late = made(store, "3.0", 2, (2,))
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    assert late.arrive("{}") == {0: '{"ranks": []}'}
    late.part([])
    assert store.num_keys() == before


def test_a_rank_that_is_in_time_for_the_next_one_waits():
    store = new_store()
    together(*(lambda rank=rank: a_save(store, "3.0", rank) for rank in range(2)))
    one = made(store, "3.1", 1)
    assert not one._is_over()
