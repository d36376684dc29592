"""The fake network: what other tests rely on."""

from __future__ import annotations

import pytest

from weft.errors import PeerError, TransportError
from weft.transport.channel import VALUE, Key, Message
from weft.transport.loopback import connect


def message(number: int) -> Message:
    return Message(Key(VALUE, 0, 0, number), payload=number)


def test_messages_arrive_at_once_at_the_peer_and_nowhere_else():
    one, two, three = connect(3)
    one.send(2, message(5))
    assert three.mailbox.take(0, message(5).key).payload == 5
    assert two.mailbox.arrivals == one.mailbox.arrivals == 0


def test_held_messages_arrive_in_order_when_released():
    one, two = connect(2)
    one.hold()
    for payload in range(3):
        one.send(1, Message(message(0).key, payload=payload))
    one.flush()
    assert two.mailbox.arrivals == 0
    one.release()
    assert [two.mailbox.take(0, message(0).key).payload for _ in range(3)] == [0, 1, 2]
    one.send(1, message(7))
    assert two.mailbox.has(0, message(7).key), "after the release nothing is held"


def test_release_without_hold_does_nothing():
    one, two = connect(2)
    one.release()
    assert two.mailbox.arrivals == 0


def test_holding_concerns_one_direction():
    one, two = connect(2)
    one.hold()
    two.send(0, message(1))
    assert one.mailbox.has(1, message(1).key)


def test_abort_tells_every_peer_and_not_oneself():
    one, two, three = connect(3)
    two.abort("ValueError: no")
    for other in (one, three):
        assert isinstance(other.mailbox.failure, PeerError)
        assert (other.mailbox.failure.rank, other.mailbox.failure.text) == (1, "ValueError: no")
        assert str(other.mailbox.failure) == "rank 1 failed: ValueError: no"
    assert two.mailbox.failure is None


def test_nothing_is_sent_after_close():
    one, two = connect(2)
    one.close()
    one.join()
    with pytest.raises(TransportError, match="rank 0 sent value 3 of microbatch 0 in step 0 after"):
        one.send(1, message(3))
    two.send(0, message(1))
    assert one.mailbox.has(1, message(1).key), "the other end may still send"
