"""Ranks that take the same turns do so whatever arrives where and when."""

from __future__ import annotations

import itertools
import random
import re
import threading

import pytest

from weft.errors import DivergenceError, StallError
from weft.runtime.executor import Executor
from weft.runtime.lockstep import LockstepOrder, Turn
from weft.runtime.microbatch import Microbatch
from weft.schedule.order import Order
from weft.schedule.schedule import Action
from weft.transport.channel import VALUE, Key, Message
from weft.transport.loopback import connect

INPUTS = 3
"""Messages that each microbatch waits for."""
BATCH = 4
ELSEWHERE = 77
"""A peer outside of the group: what it sends is put into mailboxes by hand."""


def work(events: list[str], weights: bool):
    """A body that says when it goes on, which a collective would have to match."""

    def body(microbatch: Microbatch) -> None:
        for number in range(INPUTS):
            microbatch.receive(ELSEWHERE, Key(VALUE, 1, microbatch.index, number))
            events.append(f"{microbatch.index}.{number}")
        microbatch.begin("B")
        events.append(f"{microbatch.index} back")
        later = [lambda: events.append(f"{microbatch.index} weights")]
        microbatch.completed(later if weights else ())

    return body


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_all_take_the_turns_of_the_first(seed: int, weights: bool):
    channels = connect(3)
    events: list[list[str]] = [[] for _ in channels]
    actions = [Action.parse(f"0{kind}{n}") for n in range(BATCH) for kind in ("FIW" if weights else "FB")]
    executors = []
    for rank, channel in enumerate(channels):
        turns = LockstepOrder(channel, [peer for peer in range(3) if peer != rank], rank == 0, 0)
        turns.begin(1)
        executors.append(Executor(channel.mailbox, rank, 20, turns=turns))

    def run(rank: int) -> None:
        executors[rank].run([work(events[rank], weights)] * BATCH, Order.of(actions, 99))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    everything = list(itertools.product(range(3), range(BATCH), range(INPUTS)))
    random.Random(seed).shuffle(everything)  # other arrivals on each rank
    for rank, microbatch, number in everything:
        channels[rank].mailbox.put(ELSEWHERE, Message(Key(VALUE, 1, microbatch, number)))
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for executor in executors:
        executor.close()
    assert len(events[0]) == BATCH * (INPUTS + 1 + weights)
    assert events[1] == events[2] == events[0]


def test_a_rank_that_gets_no_turn_says_so():
    channels = connect(2)
    turns = LockstepOrder(channels[1], [0], False, 0)
    turns.begin(1)
    executor = Executor(channels[1].mailbox, 1, 0.2, turns=turns)
    with pytest.raises(Exception, match="the turn that the first rank of its tensor-parallel group gives"):
        executor.run([lambda microbatch: None], Order.of([Action.parse("0F0"), Action.parse("0B0")], 99))
    executor.close()


def pair() -> tuple[LockstepOrder, LockstepOrder]:
    """The turns of a rank that leads, and of one that follows."""
    channels = connect(2)
    found = [LockstepOrder(channels[rank], [1 - rank], rank == 0, 0, wait_timeout_s=0.2) for rank in range(2)]
    for turns in found:
        turns.begin(1)
    return found[0], found[1]


def test_ranks_that_do_the_same_agree():
    first, other = pair()
    first.announce(Turn(3))
    first.agree("gathers a")
    first.end()
    assert other.next_turn() == other.next_turn() == Turn(3)
    other.taken()
    other.agree("gathers a")
    other.end()
    assert other.next_turn() is None


def test_ranks_that_do_not_are_told_so():
    first, other = pair()
    first.agree("gathers a")
    with pytest.raises(DivergenceError, match=r"the first of them gathers a, and this one gathers b\. All"):
        other.agree("gathers b")
    with pytest.raises(
        DivergenceError, match="the first of them gathers a, and this one is done with its turn"
    ):
        other.next_turn()
    first, other = pair()
    first.announce(Turn(0))
    with pytest.raises(
        DivergenceError, match="the first of them is done with its turn, and this one gathers a"
    ):
        other.agree("gathers a")


def test_a_rank_does_not_wait_for_ever():
    with pytest.raises(StallError, match=r"has sent nothing for 0\.2 s"):
        pair()[1].agree("gathers a")


def test_a_turn_of_a_microbatch_that_has_ended_is_an_error():
    channels = connect(2)
    first, other = (LockstepOrder(channels[rank], [1 - rank], rank == 0, 0) for rank in range(2))
    first.begin(1)
    other.begin(1)
    executor = Executor(channels[1].mailbox, 1, 5, turns=other)
    for microbatch in (0, 0):
        first.announce(Turn(microbatch))
    actions = Order.of([Action.parse(f"0{kind}{n}") for n in range(2) for kind in "FB"], 99)
    with pytest.raises(
        DivergenceError, match="the first of them goes on with microbatch 0, and this one has nothing"
    ):
        executor.run([lambda microbatch: None] * 2, actions)
    executor.close()


@pytest.mark.parametrize("same_samples", [True, False])
def test_a_microbatch_that_waits_for_something_else_says_so(same_samples: bool):
    """Else it would take its turns too late, and wait for one that never comes."""
    channels = connect(2)
    orders = [LockstepOrder(channels[rank], [1 - rank], rank == 0, 0, 5, same_samples) for rank in range(2)]
    executors = [Executor(channels[rank].mailbox, rank, 5, turns=orders[rank]) for rank in range(2)]
    errors: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        orders[rank].begin(1)
        channels[rank].mailbox.put(ELSEWHERE, Message(Key(VALUE, 1, 0, 7 + rank)))

        def body(microbatch: Microbatch) -> None:
            microbatch.receive(ELSEWHERE, Key(VALUE, 1, 0, 7 + rank), "what blocks.0 returns")

        try:
            executors[rank].run([body], Order.of([Action.parse("0F0"), Action.parse("0B0")], 99))
        except DivergenceError as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for executor in executors:
        executor.close()
    assert errors[0] is None
    told = "has waited for value 7 .* and this one waits there for value 8 .*what blocks.0 returns"
    assert (errors[1] is not None and re.search(told, str(errors[1])) is not None) is same_samples
