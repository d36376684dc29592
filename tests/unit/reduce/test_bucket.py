"""Buckets hold every gradient once, one kind each, no more than the cap, in the order of arrival."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.reduce.bucket import Slot, assign

SLOTS = st.lists(
    st.builds(
        Slot, st.integers(0, 50), st.sampled_from([2, 4]), st.sampled_from(["fp16", "fp32"]), st.booleans()
    ),
    max_size=12,
)


@given(SLOTS, st.integers(1, 400), st.randoms())
def test_every_gradient_travels_once_with_its_like(slots, cap, random):
    order = list(range(len(slots)))
    random.shuffle(order)
    buckets = assign(slots, order, cap)
    assert sorted(member for bucket in buckets for member in bucket.members) == list(range(len(slots)))
    place = {number: position for position, number in enumerate(order)}
    for bucket in buckets:
        inside = [slots[member] for member in bucket.members]
        assert len({slot.kind for slot in inside}) == 1
        assert bucket.sparse == any(slot.sparse for slot in inside)
        assert len(inside) == 1 or not bucket.sparse
        assert len(inside) == 1 or sum(slot.numel * slot.itemsize for slot in inside) <= cap
        assert [place[member] for member in bucket.members] == sorted(place[m] for m in bucket.members)
    full = [place[bucket.members[-1]] for bucket in buckets]
    assert full == sorted(full), "a bucket comes when it is full"


def test_a_bucket_is_closed_when_the_next_gradient_does_not_fit():
    slots = [Slot(10, 4)] * 5
    assert [bucket.members for bucket in assign(slots, [4, 3, 2, 1, 0], 80)] == [(4, 3), (2, 1), (0,)]


def test_one_gradient_larger_than_the_cap_is_a_bucket():
    assert [bucket.members for bucket in assign([Slot(100, 4), Slot(1, 4)], [0, 1], 8)] == [(0,), (1,)]


def test_an_order_names_each_once():
    with pytest.raises(ValueError, match=r"the order \[0, 0\] does not name each of 2 gradients once"):
        assign([Slot(1, 4)] * 2, [0, 0], 8)
