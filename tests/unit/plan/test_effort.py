"""Which options are tried where all are too many to simulate, and a search that is stopped."""

from __future__ import annotations

import pytest

from weft.graph import Graph, Unit
from weft.plan.option import Option, options
from weft.plan.search import STOPPED, TOO_MANY, actions_of, affordable
from weft.plan.stages import Placer, choices
from weft.schedule import make

GRAPH = Graph(Unit(f"u{i}", 1.0, 2.0, 100, 10) for i in range(16))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zbv", "interleaved_1f1b"])
def test_actions_of_patterns_are_counted(name):
    made = make(name, 4, 8, chunks=2 if name == "interleaved_1f1b" else None)
    option = Option(name, chunks=2 if name == "interleaved_1f1b" else None)
    assert actions_of(option, 4, 8) == sum(map(len, made.ranks))


def test_options_that_cannot_be_cost_nothing():
    assert actions_of(Option("v_min", chunks=3), 4, 8) == 0
    assert len(affordable([Option("v_min", chunks=3), Option("gpipe")], 4, 8, False, most=1)) == 1


def test_small_searches_try_all():
    every = options(4, 8)
    assert affordable(every, 4, 8, limited=False) == every


@pytest.mark.parametrize("limited", [False, True])
def test_large_searches_try_what_is_worth_most(limited):
    every = options(64, 256)
    taken = affordable(every, 64, 256, limited)
    assert sum(actions_of(one, 64, 256) for one in taken) <= 500_000
    assert {"1f1b", "zb_h1", "zbv", "interleaved_1f1b"} <= {one.schedule for one in taken}
    assert not any(one.recompute or one.like for one in taken)
    assert taken == [one for one in every if one in taken]


def test_what_saves_memory_comes_earlier_with_a_limit():
    every = options(16, 64)
    free, limited = (affordable(every, 16, 64, limit) for limit in (False, True))

    def saving(taken: list[Option]) -> int:
        return sum(one.recompute or one.active is not None for one in taken)

    def listed(taken: list[Option]) -> int:
        return sum(one.like is not None and not one.recompute for one in taken)

    assert saving(free) < saving(limited) and listed(free) > listed(limited)


def test_one_option_is_tried_in_any_case():
    assert len(affordable(options(64, 256), 64, 256, False, most=1)) == 1


def test_what_is_not_tried_is_named(monkeypatch):
    monkeypatch.setattr("weft.plan.search.affordable.__defaults__", (200,))
    found = choices(Placer(GRAPH, 4, 8))
    assert not found[0].fault and found[-1].fault == TOO_MANY
    assert len(found) == len(options(4, 8))


def test_progress_is_told_and_a_search_can_be_stopped():
    told = []

    def progress(done: int, of: int, best_s: float | None) -> None:
        told.append((done, of, best_s))
        if done == 3:
            raise KeyboardInterrupt

    found = choices(Placer(GRAPH, 4, 8), progress=progress)
    assert [done for done, _, _ in told] == [0, 1, 2, 3] and told[0][2] is None and told[3][2] is not None
    assert not found[0].fault and sum(one.fault == STOPPED for one in found) == len(options(4, 8)) - 3


def test_a_search_that_has_found_nothing_is_ended():
    def progress(done: int, of: int, best_s: float | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choices(Placer(GRAPH, 4, 8), progress=progress)
