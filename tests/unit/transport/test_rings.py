"""Rings of shared memory, two ranks in one process; `gloo_pair.py` has them between two."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from weft.transport import rings
from weft.transport.rings import Rings
from weft.transport.segment import Segment, available

pytestmark = pytest.mark.skipif(not available(), reason="shared memory needs Linux on x86-64")

RING = 4096


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Rings, Rings]:
    """Rings of 4096 bytes."""
    monkeypatch.setattr(rings, "RING_BYTES", RING)
    segments = {rank: Segment.create(2 * RING)[0] for rank in (0, 1)}
    return Rings(0, segments), Rings(1, segments)


def payload(size: int, number: int = 0) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def test_what_is_put_is_taken_however_late(pair: tuple[Rings, Rings]):
    """Against a plain queue: any sizes, both directions, the reader up to five behind; what has no room is refused."""
    choice = random.Random(0)
    refused = 0
    waiting: dict[int, deque] = {0: deque(), 1: deque()}
    for number in range(2000):
        sender = choice.randrange(2)
        sent = payload(choice.choice((100, 101, 640, 1000, 3000)), number)
        place = pair[sender].put(1 - sender, sent)
        if place is None:
            refused += 1
            assert waiting[sender], "an empty ring has room"
        else:
            waiting[sender].append((place, sent))
        while len(waiting[sender]) > choice.randrange(6):
            place, expected = waiting[sender].popleft()
            assert torch.equal(pair[1 - sender].take(sender, *place, expected.numel()), expected)
    assert 0 < refused < 1000
    assert min(pair[0].given(1), pair[1].given(0)) > 100 * RING


def test_a_payload_that_does_not_fit_goes_another_way(pair: tuple[Rings, Rings]):
    first, _ = pair
    assert first.put(1, payload(RING + 1)) is None, "larger than the ring"
    assert first.put(2, payload(1000)) is None, "a rank on another host"
    assert first.put(1, payload(RING)) == (0, RING)
    assert first.put(1, payload(100)) is None, "nothing has been read"


def test_a_full_ring_has_room_again_when_it_was_read(pair: tuple[Rings, Rings]):
    first, second = pair
    place = first.put(1, payload(3000))
    assert first.put(1, payload(2000)) is None
    assert place is not None
    second.take(0, *place, 3000)
    assert first.put(1, payload(2000)) == (0, RING + 2048), "from the start again: in one piece"


def test_a_ring_that_starts_again_has_room_for_several(pair: tuple[Rings, Rings]):
    first, second = pair
    place = first.put(1, payload(500))
    assert place is not None
    second.take(0, *place, 500)
    assert [first.put(1, payload(1000)) for _ in range(5)] == [
        *[(at, RING + at + 1024) for at in range(0, RING, 1024)],
        None,
    ]


def test_memory_stays_readable_after_its_close(pair: tuple[Rings, Rings]):
    first, second = pair
    place = first.put(1, payload(500, 3))
    assert place is not None
    taken = second.take(0, *place, 500)
    first.close()
    second.close()
    assert torch.equal(taken, payload(500, 3))
