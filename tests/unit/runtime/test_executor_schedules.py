"""Every schedule on executors that talk to each other: all actions run, the list's order where nothing delays them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.runtime.toys import Body, Rank, one_rank, run_all
from weft import schedule
from weft.runtime.executor import Checks
from weft.runtime.microbatch import Microbatch
from weft.schedule import Action, Schedule
from weft.schedule.order import Order
from weft.transport.channel import GRADIENT, VALUE, Key, Message

NAMES = list(schedule.CHUNKS)


def staged(rank: Rank, made: Schedule, ran: list[Action]) -> Body:
    """A program that visits its stages in order and goes back the same way; stage `s` adds `s`."""
    owners, last = made.rank_of_stage, made.stages - 1
    own = [stage for stage, owner in enumerate(owners) if owner == rank.number]
    split = {action[::2] for actions in made.ranks for action in actions if action.kind == "W"}

    def body(microbatch: Microbatch) -> None:
        index = microbatch.index

        def does(kind: str, stage: int) -> None:
            ran.append(Action(stage, kind, index))
            microbatch.worked = True
            rank.work(microbatch)

        def move(kind: int, stage: int, to: int, value: int) -> None:
            if owners[to] == rank.number:
                kept[kind, to] = value
            else:
                rank.channel.send(owners[to], Message(Key(kind, 0, index, to), payload=value))

        def take(kind: int, stage: int, source: int) -> int:
            if owners[source] == rank.number:
                return kept.pop((kind, stage))
            payload: int = microbatch.receive(owners[source], Key(kind, 0, index, stage)).payload
            return payload

        kept: dict[tuple[int, int], int] = {}
        for stage in own:
            microbatch.enter(stage)
            value = take(VALUE, stage, stage - 1) if stage else 0
            does("F", stage)
            if stage < last:
                move(VALUE, stage, stage + 1, value + stage)
        microbatch.begin("B")
        for stage in reversed(own):
            microbatch.enter(stage)
            value = take(GRADIENT, stage, stage + 1) if stage < last else 0
            splits = (stage, index) in split
            does("I" if splits else "B", stage)
            if stage:
                move(GRADIENT, stage, stage - 1, value + stage)
            tasks = [lambda stage=stage: ran.append(Action(stage, "W", index))] if splits else []
            microbatch.completed(tasks)

    return body


def run(made: Schedule, seed: int = 0, slowest_s: float = 0.0) -> tuple[list[Rank], list[list[Action]]]:
    ranks = Rank.make(len(made.ranks))
    for rank in ranks:
        rank.dice, rank.slowest_s = random.Random(seed * 10 + rank.number), slowest_s
    ran: list[list[Action]] = [[] for _ in ranks]
    orders = [Order.of(actions, len(actions)) for actions in made.ranks]
    results = run_all(
        ranks, lambda rank, index: staged(rank, made, ran[rank.number]), orders, made.microbatches
    )
    assert results == [[None] * made.microbatches for _ in ranks]
    return ranks, ran


@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(1, 10), st.integers(0, 99))
@settings(max_examples=60)
def test_all_actions_run_once_within_the_limit(name: str, ranks: int, microbatches: int, seed: int):
    made = schedule.make(name, ranks, microbatches)
    _, ran = run(made, seed, 3e-4)
    for own, actions in zip(ran, made.ranks, strict=True):
        assert sorted(own) == sorted(actions)
        stages = len({action.stage for action in actions})
        # The lowest microbatch may enter a stage although the limit is reached: else it might never get on.
        assert schedule.in_flight(own) <= schedule.in_flight(actions) + stages - 1


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_follows_its_list(name: str):
    """With all stages on one rank nothing is ever late."""
    made = schedule.make(name, 1, 5)
    _, (ran,) = run(made)
    assert ran == list(made.ranks[0])


def deliver_all(rank: Rank, made: Schedule) -> None:
    """Every message that the rank will ever receive is there."""
    owners = made.rank_of_stage
    for index in range(made.microbatches):
        for stage in (stage for stage, owner in enumerate(owners) if owner == rank.number):
            for kind, source in ((VALUE, stage - 1), (GRADIENT, stage + 1)):
                if 0 <= source < made.stages and owners[source] != rank.number:
                    message = Message(Key(kind, 0, index, stage), payload=1)
                    rank.channel.mailbox.put(owners[source], message)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_microbatches_that_wait_for_their_inputs_hold_no_place(name: str, ranks: int):
    """All start before anything is there; then everything comes at once."""
    made = schedule.make(name, ranks, 6)
    for number in range(ranks):
        rank = one_rank(number, ranks)

        arrived: list[bool] = []

        def arrive(rank: Rank = rank, arrived: list[bool] = arrived) -> None:
            if not arrived:
                arrived.append(True)
                deliver_all(rank, made)

        ran: list[Action] = []
        if not number:
            arrive()  # it waits for nobody before it has worked
        actions = made.ranks[number]
        bodies = [staged(rank, made, ran) for _ in range(made.microbatches)]
        rank.run(bodies, Order.of(actions, len(actions)), Checks(before_wait=arrive))
        assert ran == list(actions)
        rank.executor.close()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "1f1b"])  # it holds one microbatch
def test_inputs_that_come_while_the_second_microbatch_starts_are_taken_in_order(name: str):
    made = schedule.make(name, 2, 6)
    rank = one_rank(1, 2)
    ran: list[Action] = []
    program = staged(rank, made, ran)

    def body(microbatch: Microbatch) -> None:
        if microbatch.index == 1:
            deliver_all(rank, made)
        program(microbatch)

    actions = made.ranks[1]
    rank.run([body] * made.microbatches, Order.of(actions, len(actions)))
    assert ran == list(actions)
    rank.executor.close()


def test_gradients_that_are_there_at_once_are_taken_in_order():
    """Both come while the second microbatch runs: the first one's goes first, so sums are the same in every run."""
    rank = one_rank(0, 2)
    ran: list[int] = []

    def body(microbatch: Microbatch) -> None:
        microbatch.worked = True
        microbatch.begin("B")
        if microbatch.index == 1:
            for index in (0, 1):
                rank.channel.mailbox.put(1, Message(Key(GRADIENT, 0, index, 0), payload=1))
        microbatch.receive(1, Key(GRADIENT, 0, microbatch.index, 0))
        ran.append(microbatch.index)

    actions = [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)]
    rank.run([body, body], Order.of(actions, 2))
    assert ran == [0, 1]
    rank.executor.close()


def test_weights_fill_the_wait_and_then_give_way():
    made = schedule.make("zb_h1", 2, 4)
    _, ran = run(made, 3, 2e-3)
    for own in ran:
        for action in own:
            if action.kind == "W":
                assert own.index(action) > own.index(action._replace(kind="I"))
