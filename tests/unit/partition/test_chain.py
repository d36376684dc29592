"""`split` against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlacementError
from weft.partition.chain import search
from weft.partition.chain.chain import split


def legal(placement, partitions, groups, fixed):
    """Whether groups lie together, `fixed` is kept and the rest ascends."""
    members = {}
    for unit, group in enumerate(groups):
        members.setdefault(("unit", unit) if group is None else group, []).append(unit)
    ascending = []
    for units in members.values():
        if len({placement[unit] for unit in units}) > 1:
            return False
        if units[-1] - units[0] + 1 == len(units):
            ascending.append(placement[units[0]])
    return ascending == sorted(ascending) and all(placement[u] == p for u, p in fixed.items())


def oracle(costs, partitions, groups, fixed):
    """The best of all placements."""

    def key(placement):
        loads = [0] * partitions
        for cost, partition in zip(costs, placement, strict=True):
            loads[partition] += cost
        crossings = sum(a != b for a, b in itertools.pairwise(placement))
        empty = len(set(placement)) < partitions
        return empty, max(loads), crossings, sum(load * load for load in loads), placement

    candidates = itertools.product(range(partitions), repeat=len(costs))
    return list(min((c for c in candidates if legal(c, partitions, groups, fixed)), key=key))


@st.composite
def problems(draw):
    n = draw(st.integers(1, 6))
    partitions = draw(st.integers(1, 4 if n < 6 else 3))
    costs = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    groups = draw(st.lists(st.sampled_from([None, None, 0, 1]), min_size=n, max_size=n))
    wish = draw(st.dictionaries(st.integers(0, n - 1), st.integers(0, partitions - 1), max_size=2))
    return costs, partitions, groups, wish


@settings(max_examples=300)
@given(problems())
def test_split_equals_trying_everything(problem):
    costs, partitions, groups, fixed = problem
    try:
        found = split(costs, partitions, groups, fixed)
    except PlacementError:
        placements = itertools.product(range(partitions), repeat=len(costs))
        assert not any(legal(placement, partitions, groups, fixed) for placement in placements)
    else:
        assert found == oracle(costs, partitions, groups, fixed)


@pytest.mark.parametrize(
    ("costs", "partitions", "groups", "expected"),
    [
        ([1, 1, 1, 1], 2, None, [0, 0, 1, 1]),
        ([5, 1, 1, 1], 2, None, [0, 1, 1, 1]),
        ([1, 1], 4, None, [0, 1]),
        ([9, 0, 0], 3, None, [0, 1, 2]),
        ([3, 2, 2, 2, 3], 3, [0, None, None, None, 0], [0, 1, 1, 2, 0]),
        ([1, 2, 2, 1, 1], 2, [None, 4, 4, None, None], [0, 0, 0, 1, 1]),
        ([], 3, None, []),
    ],
)
def test_placements(costs, partitions, groups, expected):
    assert split(costs, partitions, groups) == expected


def test_loads_that_differ_by_rounding_are_equal():
    assert split([0.1, 0.2, 0.3, 0.3], 2) == split([1, 2, 3, 3], 2)


@settings(max_examples=50)
@given(problems())
def test_coordinate_descent_keeps_the_rules(problem):
    costs, partitions, groups, _ = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "COMBINATIONS", 0)
        found = split(costs, partitions, groups)
    assert legal(found, partitions, groups, {})


def test_many_spread_groups():
    """Two layers share each parameter, 30 times over: 4 ** 30 choices."""
    costs = [1.0] * 60
    placement = split(costs, 4, [*range(30), *range(30)])
    assert sorted(map(placement.count, range(4))) == [14, 14, 16, 16]


def test_two_thousand_units_on_sixteen_partitions():
    source = random.Random(0)
    costs = [source.random() for _ in range(2000)]
    placement = split(costs, 16, [0, *[None] * 1998, 0])
    loads = [sum(c for c, p in zip(costs, placement, strict=True) if p == i) for i in range(16)]
    assert max(loads) < 1.01 * sum(costs) / 16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1], 0), "partitions is 0, it must be at least 1"),
        (([1, 2], 1, [None]), "groups has 1 entries for 2 units"),
        (([1, -2], 1), "the cost of unit 1 is -2, it must be a number of at least 0"),
        (([float("nan")], 1), "the cost of unit 0 is nan"),
        (([1], 1, None, {3: 0}), "fixed names unit 3, but there are 1 units"),
        (([1], 2, None, {0: 2}), "fixed puts unit 0 on partition 2, but there are 2"),
        (
            ([1, 1, 1], 2, [0, None, 0], {0: 0, 2: 1}),
            "fixed puts the units 0 and 2 of one group on the partitions 0 and 1: give them the same",
        ),
        (
            ([1, 1, 1], 2, None, {0: 1, 2: 0}),
            "fixed puts unit 0 on partition 1 and unit 2 after it on partition 0, but partitions follow the",
        ),
    ],
)
def test_faults(arguments, text):
    with pytest.raises(PlacementError, match=text):
        split(*arguments)
