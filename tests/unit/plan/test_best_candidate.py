"""The best of several placements by its simulated step, by the schedules that their stages allow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.partition.balanced.graphs import graph_of, small_graphs
from weft.config import Settings
from weft.errors import PlacementError, UsageError
from weft.partition.balanced.candidate import Candidate
from weft.plan.best_candidate import asked_options, best_by_step
from weft.plan.chosen import Chosen
from weft.plan.option import Option
from weft.schedule import make
from weft.schedule.legal import check
from weft.schedule.table import KINDS
from weft.simulate import FREE, Links
from weft.topology.cluster import Link

LINKS = Links.uniform(Link.parse("1MB/s,1ms"))
CHAIN = graph_of([(0, 1), (1, 2), (2, 3)], 4)


def candidate(where, graph=CHAIN, name="given"):
    return Candidate.of(name, graph, where, 1 + max(where), ())


def test_a_chain_of_stages_runs_by_the_pattern():
    best = best_by_step(CHAIN, [candidate((0, 0, 1, 1))], 2, 4, FREE)
    assert best.chosen.schedule.ranks == make("1f1b", 2, 4).ranks
    assert best.stage_of_unit == (0, 0, 1, 1) and best.chosen.schedule.rank_of_stage == (0, 1)
    assert best.chosen.step_s == pytest.approx(5 * 6e-3)
    simple = best_by_step(CHAIN, [candidate((0, 0, 1, 1))], 2, 4, FREE, options=[Option("gpipe")])
    assert simple.chosen.schedule.ranks == make("gpipe", 2, 4).ranks
    looped = Option("interleaved_1f1b", chunks=2)
    best = best_by_step(CHAIN, [candidate((0, 1, 0, 1))], 2, 4, FREE, options=[looped])
    assert best.chosen.schedule.ranks == make("interleaved_1f1b", 2, 4, chunks=2).ranks


def test_stages_of_no_pattern_run_by_list_scheduling():
    best = best_by_step(CHAIN, [candidate((0, 1, 1, 0))], 2, 4, LINKS)
    assert str(best.chosen.option) == "list on 1f1b"
    assert best.chosen.schedule.rank_of_stage == (0, 1, 0) and best.stage_of_unit == (0, 1, 1, 2)
    check(best.chosen.schedule)
    assert not any(action.kind in "IW" for row in best.chosen.schedule.ranks for action in row)


def test_the_shortest_step_wins_and_the_table_has_all():
    good, bad = candidate((0, 0, 1, 1), name="even"), candidate((0, 1, 1, 1), name="uneven")
    best = best_by_step(CHAIN, [bad, good], 2, 4, FREE)
    assert best.candidate is good
    lines = best.chosen.reasons.splitlines()
    assert [line.split()[0] for line in lines] == ["placement", "even", "uneven"]
    assert lines[1].split()[-1] == f"{best.chosen.step_s * 1e3:.3f}"
    assert Chosen.from_json(best.chosen.to_json()).schedule == best.chosen.schedule


def test_what_does_not_fit_the_memory_comes_last():
    even, uneven = candidate((0, 0, 1, 1), name="even"), candidate((0, 1, 1, 1), name="uneven")
    needs = [4 * 100 + 2 * 16, 4 * 300 + 3 * 16]
    best = best_by_step(CHAIN, [even, uneven], 2, 4, FREE, memory_bytes=needs)
    assert best.candidate is uneven and not best.fault
    best = best_by_step(CHAIN, [even, uneven], 2, 4, FREE, memory_bytes=[500, 500])
    assert "needs" in best.fault


def test_no_candidate_is_an_error():
    with pytest.raises(PlacementError, match="no candidate can be run: give at least one placement"):
        best_by_step(CHAIN, [], 2, 4, FREE)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_best_is_never_worse_than_any_one(data):
    """The step of the chosen one is at most that of a contiguous one, whatever the others are."""
    graph = data.draw(small_graphs(8))
    ranks = data.draw(st.integers(1, 3))
    wheres = data.draw(
        st.lists(
            st.lists(st.integers(0, ranks - 1), min_size=len(graph), max_size=len(graph)),
            min_size=1,
            max_size=4,
        )
    )
    straight = candidate(sorted(wheres[0]), graph)
    alone = best_by_step(graph, [straight], ranks, 4, LINKS)
    best = best_by_step(graph, [*(candidate(where, graph) for where in wheres), straight], ranks, 4, LINKS)
    assert best.chosen.step_s <= alone.chosen.step_s * (1 + 1e-9)


def test_which_options_a_job_asks_for():
    def asked(**given):
        return [*map(str, asked_options(Settings(partitions=2, **given)))]

    assert asked(pipeline="1f1b", active_microbatches=3) == ["1f1b, 3 active"]
    assert asked(pipeline="interleaved_1f1b", chunks=3) == ["interleaved_1f1b, 3 chunks"]
    assert asked(pipeline="list") == ["list on 1f1b"]
    assert asked(pipeline="auto") == ["1f1b", "gpipe", "list on 1f1b"]
    for name in (name for name, kind in KINDS.items() if kind.splits):
        with pytest.raises(UsageError, match=f'"{name}", which splits backward passes.* write one of 1f1b'):
            asked(pipeline=name)
    with pytest.raises(UsageError, match='pipeline is "file", which comes from a file'):
        asked(pipeline="file")
