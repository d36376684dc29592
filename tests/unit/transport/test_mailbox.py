"""What arrived and was not taken yet: order, waits that end, and what stays."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PeerError, StallError, TransportError
from weft.transport.channel import GRADIENT, KINDS, OUTPUT, SPEC, VALUE, Key, Mailbox, Message

A = Key(VALUE, 1, 0, 7)
B = Key(GRADIENT, 1, 0, 7)


def test_messages_of_one_key_keep_their_order():
    mailbox = Mailbox()
    for number in range(5):
        mailbox.put(1, Message(A, payload=number))
    assert [mailbox.take(1, A).payload for _ in range(5)] == [0, 1, 2, 3, 4]
    assert mailbox.take(1, A) is None


def test_peers_and_keys_are_apart():
    mailbox = Mailbox()
    mailbox.put(1, Message(A, payload="from 1"))
    mailbox.put(2, Message(A, payload="from 2"))
    mailbox.put(1, Message(B, payload="gradient"))
    assert mailbox.take(2, A).payload == "from 2"
    assert not mailbox.has(2, A) and mailbox.has(1, A)
    assert mailbox.take(1, B).payload == "gradient"
    assert mailbox.take(1, A).payload == "from 1"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40))
def test_whatever_was_put_is_taken_once_and_in_order(sent: list[tuple[int, int]]):
    mailbox = Mailbox()
    expected: dict[tuple[int, int], list[int]] = {}
    for number, (peer, what) in enumerate(sent):
        mailbox.put(peer, Message(Key(VALUE, 0, 0, what), payload=number))
        expected.setdefault((peer, what), []).append(number)
    assert mailbox.arrivals == len(sent)
    for (peer, what), numbers in expected.items():
        key = Key(VALUE, 0, 0, what)
        assert [mailbox.take(peer, key).payload for _ in numbers] == numbers
        assert not mailbox.has(peer, key)


def test_a_signature_stays_for_every_microbatch_that_asks():
    mailbox = Mailbox()
    tell = Key(SPEC, 0, 0, 99)
    mailbox.put(1, Message(tell, text="old"))
    mailbox.put(1, Message(tell, text="new"))
    assert [mailbox.take(1, tell).text for _ in range(3)] == ["new"] * 3
    assert mailbox.has(1, tell)


def test_discard_drops_what_earlier_steps_left_but_no_signature():
    mailbox = Mailbox()
    kept = [Key(SPEC, 0, 0, 1), Key(OUTPUT, 5, 0, 1)]
    for key in (Key(OUTPUT, 3, 0, 1), Key(OUTPUT, 4, 1, 1), *kept):
        mailbox.put(1, Message(key))
    assert mailbox.discard(before_step=5) == 2
    assert [mailbox.has(1, key) for key in kept] == [True, True]
    assert mailbox.discard(before_step=5) == 0


def test_discard_drops_signatures_of_earlier_generations():
    mailbox = Mailbox()
    for generation in range(3):
        mailbox.put(1, Message(Key(SPEC, generation, 0, 1)))
    assert mailbox.discard(before_step=9, before_generation=2) == 2
    assert mailbox.has(1, Key(SPEC, 2, 0, 1))


def test_a_failure_ends_present_waits_and_the_first_cause_counts():
    mailbox = Mailbox()
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(mailbox.wait(0, 3600)), daemon=True)
    waiter.start()
    time.sleep(0.05)
    first = PeerError(1, "first")
    mailbox.fail(first)
    waiter.join(60)
    assert seen == [1]
    mailbox.fail(TransportError("second"))
    assert mailbox.failure is first


def test_a_wait_ends_at_once_if_something_came_meanwhile():
    mailbox = Mailbox()
    seen = mailbox.arrivals
    mailbox.put(1, Message(A))
    assert mailbox.wait(seen, 3600) == 1


def test_a_wait_without_arrival_gives_the_same_count_after_its_time():
    assert Mailbox().wait(0, 0.01) == 0


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_key_says_what_it_is(kind: int):
    assert str(Key(kind, 4, 2, 9)) == f"{KINDS[kind]} 9 of microbatch 2 in step 4"


def test_a_message_is_received_when_it_comes():
    mailbox, key = Mailbox(), Key(VALUE, 0, 0, 5)
    sender = threading.Timer(0.05, lambda: mailbox.put(1, Message(key, text="late")))
    sender.start()
    assert mailbox.receive(1, key, 30.0, "it is late").text == "late"
    mailbox.put(1, Message(key, text="there already"))
    assert mailbox.receive(1, key, 0.0, "it is there").text == "there already"


def test_a_message_that_does_not_come_is_a_stall_with_the_given_text():
    mailbox = Mailbox()
    with pytest.raises(StallError, match="^rank 1 has nothing to say$"):
        mailbox.receive(1, Key(VALUE, 0, 0, 5), 0.01, "rank 1 has nothing to say")


def test_a_failure_ends_the_wait_for_one_message():
    mailbox, cause = Mailbox(), ConnectionError("gone")
    mailbox.fail(cause)
    with pytest.raises(ConnectionError) as caught:
        mailbox.receive(1, Key(VALUE, 0, 0, 5), 30.0, "never")
    assert caught.value is cause
