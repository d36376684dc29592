"""Rows grouped by length: every row once, nothing of a token cut off, and no microbatch much dearer than others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.session.cut import Group
from weft.session.lengths import PARTS, group, group_by_length

LENGTH = 200
SPANS = st.lists(
    st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda ends: (min(ends), max(ends))),
    min_size=1,
    max_size=40,
)


@given(SPANS, st.integers(1, 12))
def test_every_row_and_every_token_is_in_one_group(spans: list[tuple[int, int]], count: int):
    groups = group_by_length(spans, LENGTH, count)
    assert len(groups) == min(count, len(spans))
    assert sorted(row for one in groups for row in one.rows) == list(range(len(spans)))
    for one in groups:
        assert 0 <= one.start < one.stop <= one.length == LENGTH and list(one.rows) == sorted(one.rows)
        for start, stop in (spans[row] for row in one.rows):
            assert start == stop or one.start <= start < stop <= one.stop


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=40), st.integers(1, 8), st.booleans())
def test_padding_on_one_side_is_cut_off_there(lengths: list[int], count: int, left: bool):
    spans = [(LENGTH - n, LENGTH) if left else (0, n) for n in lengths]
    groups = group_by_length(spans, LENGTH, count)
    assert all(one.stop == LENGTH if left else one.start == 0 for one in groups)
    rounded = LENGTH // PARTS
    for one in groups:
        assert one.stop - one.start < max(lengths[row] for row in one.rows) + rounded
    assert len({one.stop - one.start for one in groups}) <= 2 * PARTS + 1
    whole = sum(one.cost for one in groups)
    assert whole <= len(lengths) * min(LENGTH, max(lengths) + rounded)


def test_the_largest_cost_is_as_small_as_it_can_be():
    spans = [(0, n) for n in (64, 64, 32, 32, 32, 32, 16, 16, 16, 16, 16, 16, 16, 16)]
    assert [one.cost for one in group_by_length(spans, 64, 3)] == [128, 128, 128]


def test_costs_rise_and_fall():
    costs = [one.cost for one in group_by_length([(0, n) for n in range(3, 90)], 128, 12)]
    top = costs.index(max(costs))
    assert costs[: top + 1] == sorted(costs[: top + 1]) and costs[top:] == sorted(costs[top:], reverse=True)
    assert top not in (0, 11)


@pytest.mark.parametrize(
    ("spans", "multiple", "expected"),
    [
        ([(0, 0), (5, 5)], 4, (0, 4)),
        ([(0, 5), (3, 3)], 4, (0, 8)),
        ([(0, 9)], 4, (0, 10)),
        ([(7, 10)], 4, (6, 10)),
        ([(2, 5), (4, 9)], 4, (2, 10)),
    ],
)
def test_rounding_goes_into_padding(spans: list[tuple[int, int]], multiple: int, expected: tuple[int, int]):
    found = group(range(len(spans)), spans, 10, multiple)
    assert found == Group(tuple(range(len(spans))), *expected, 10)
