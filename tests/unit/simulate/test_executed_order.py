"""The order in which ranks run their actions: against real executors on a clock that the test turns, and by hand."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulate.cases import cases, rows
from weft.errors import ScheduleError
from weft.runtime.executor import Executor
from weft.runtime.microbatch import Microbatch
from weft.schedule import CHUNKS, Schedule, make
from weft.schedule.order import Order
from weft.schedule.schedule import Action
from weft.simulate import Links, StageCost, executed_order, peak_bytes, simulate
from weft.topology.cluster import Cluster, Link
from weft.transport.channel import GRADIENT, VALUE, Key, Mailbox, Message

NAMES = sorted(CHUNKS)
TIMES = st.floats(0.5, 4.0)


class Clock(Mailbox):
    """Messages that arrive at times which are known before; waiting turns the clock to the next one."""

    def __init__(self, arrivals_s: dict[tuple[int, Key], float]) -> None:
        super().__init__()
        self.now_s = 0.0
        self._coming = sorted(((at_s, peer, key) for (peer, key), at_s in arrivals_s.items()), reverse=True)

    def turn(self, now_s: float) -> None:
        self.now_s = now_s
        while self._coming and self._coming[-1][0] <= now_s:
            _, peer, key = self._coming.pop()
            self.put(peer, Message(key))

    def wait(self, seen: int, timeout_s: float) -> int:
        self.turn(self._coming[-1][0])
        return self.arrivals


def really_run(
    rank: int, made: Schedule, costs: list[StageCost], ends_s: dict[Action, float], ahead: int | None
) -> list[str]:
    """What an executor does whose peers end their actions at these times, on links that take no time."""
    actions, owners = made.ranks[rank], made.rank_of_stage
    own = sorted({action.stage for action in actions})
    arrivals_s = {}
    for (stage, kind, index), end_s in ends_s.items():
        to = stage + 1 if kind == "F" else stage - 1
        if owners[stage] != rank and kind != "W" and to in own:
            arrivals_s[owners[stage], Key(VALUE if kind == "F" else GRADIENT, 0, index, to)] = end_s
    clock = Clock(arrivals_s)
    order = Order.of(actions, limit=len(actions), ahead=ahead)
    did: list[str] = []

    def work(action: Action) -> None:
        cost = costs[action.stage]
        took_s = {"F": cost.forward_s, "B": cost.backward_s, "I": cost.input_s, "W": cost.weight_s}[
            action.kind
        ]
        did.append(str(action))
        clock.turn(clock.now_s + took_s)

    def receive(microbatch: Microbatch, kind: int, stage: int, before: int) -> None:
        if 0 <= before < made.stages and owners[before] != rank:
            microbatch.receive(owners[before], Key(kind, 0, microbatch.index, stage))

    def body(microbatch: Microbatch) -> None:
        for stage in own:
            microbatch.enter(stage)
            receive(microbatch, VALUE, stage, stage - 1)
            microbatch.worked = True
            work(Action(stage, "F", microbatch.index))
        microbatch.begin("B")
        for stage in reversed(own):
            microbatch.enter(stage)
            receive(microbatch, GRADIENT, stage, stage + 1)
            later = Action(stage, "W", microbatch.index) if (stage, microbatch.index) in order.later else None
            work(Action(stage, "I" if later else "B", microbatch.index))
            microbatch.completed([partial(work, later)] if later else [])

    executor = Executor(clock, rank)
    executor.run([body] * made.microbatches, order)
    executor.close()
    return did


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(2, 3),
    st.integers(1, 6),
    st.sampled_from([0, 1, None]),
    st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES), min_size=6, max_size=6),
)
def test_executors_run_in_that_order(name, ranks, microbatches, ahead, times):
    made = make(name, ranks=ranks, microbatches=microbatches)
    costs = [StageCost(*times[stage]) for stage in range(made.stages)]
    order = executed_order(made.ranks, made.rank_of_stage, costs, ahead=ahead)
    step = simulate(order, made.rank_of_stage, costs)
    ends_s = {
        action: end
        for row, ends in zip(order, step.end_s, strict=True)
        for action, end in zip(row, ends, strict=True)
    }
    for rank in range(ranks):
        assert really_run(rank, made, costs, ends_s, ahead) == [str(action) for action in order[rank]]


links = st.builds(
    Link, st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([4.0, 16.0, 1e9]), st.booleans(), st.just("link")
)
clusters = st.builds(Cluster, st.sampled_from([(4,), (2, 2), (1, 1, 1, 1)]), links, links)


@settings(deadline=None)
@given(cases(), clusters, st.booleans(), st.sampled_from([0.0, 0.25]), st.sampled_from([0, 2, None]))
def test_every_order_can_be_run(case, cluster, overlap, overhead_s, ahead):
    crossings = Links(cluster.link, overlap, overhead_s)
    order = executed_order(
        case.actions, case.rank_of_stage, case.costs, crossings, edges=case.edges, ahead=ahead
    )
    assert [sorted(row) for row in order] == [sorted(row) for row in case.actions]
    step = simulate(order, case.rank_of_stage, case.costs, crossings, edges=case.edges)
    assert all(len(ends) == len(row) for ends, row in zip(step.end_s, order, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(2, 4),
    st.integers(1, 8),
    st.lists(
        st.tuples(TIMES, TIMES, TIMES, TIMES, st.integers(0, 9), st.integers(0, 9)), min_size=8, max_size=8
    ),
)
def test_under_a_limit_no_rank_holds_more_than_its_list(name, ranks, microbatches, given):
    made = make(name, ranks=ranks, microbatches=microbatches)
    costs = [
        StageCost(*times, activation_bytes=kept + more, weight_bytes=kept)
        for *times, kept, more in given[: made.stages]
    ]
    order = executed_order(made.ranks, made.rank_of_stage, costs, ahead=None)
    planned = peak_bytes(made.ranks, made.rank_of_stage, costs)
    for found, allowed in zip(peak_bytes(order, made.rank_of_stage, costs), planned, strict=True):
        assert found <= allowed


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_a_list_is_followed_where_stages_cost_what_it_was_made_for(name: str, microbatches: int):
    made = make(name, ranks=4, microbatches=microbatches)
    assert executed_order(made.ranks, made.rank_of_stage, [StageCost(1, 2)] * 4) == [
        list(row) for row in made.ranks
    ]


@pytest.mark.parametrize(
    ("ahead", "expected"), [(0, "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"), (1, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3")]
)
def test_a_rank_that_waits_may_begin_more(ahead: int, expected: str):
    made = make("1f1b", ranks=2, microbatches=4)
    order = executed_order(made.ranks, made.rank_of_stage, [StageCost(1, 1), StageCost(3, 3)], ahead=ahead)
    assert " ".join(map(str, order[0])) == expected


def test_what_the_list_puts_later_fills_the_time_in_which_a_gradient_is_on_its_way():
    lists = rows("0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1B0 1F1 1B1")
    order = executed_order(lists, [0, 1], [StageCost(1, 1, 1, 1), StageCost(1, 4)])
    assert " ".join(map(str, order[0])) == "0F0 0F1 0I0 0W0 0I1 0W1"


def test_what_never_becomes_possible_is_told():
    lists = rows("0F0 0B0", "1F0 1F1 1B0")
    order = executed_order(lists, [0, 1], [StageCost(1, 1)] * 2)
    assert " ".join(map(str, order[1])) == "1F0 1B0 1F1"
    with pytest.raises(ScheduleError, match="rank 1 before 1F1"):
        simulate(order, [0, 1], [StageCost(1, 1)] * 2)
