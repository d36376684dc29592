"""Moves between neighbours: never worse, no more stages than before, fixed items stay."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.partition.balanced.graphs import graph_of
from tests.unit.partition.balanced.test_contiguous import loads, problems, squares
from weft.partition import Problem
from weft.partition.balanced.candidate import Balance, cut_bytes
from weft.partition.balanced.items import Items
from weft.partition.balanced.moves import improve


def score(items, where, partitions, limits):
    over = sum(
        max(0, load - limit) / (sum(weights) or 1)
        for weights, limit in zip(items.weights, limits, strict=True)
        for load in loads(weights, where, partitions)
    )
    return round(over, 6), cut_bytes(items.flows, where), round(squares(items, where, partitions), 6)


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_moves_never_make_it_worse(drawn, data):
    items, partitions = drawn
    where = [data.draw(st.integers(0, partitions - 1)) for _ in range(len(items))]
    where = [items.fixed.get(item, at) for item, at in enumerate(where)]
    limits = [data.draw(st.integers(0, 20)) for _ in items.weights]
    tried = []

    def admits(other):
        """Some rule: no item leaves partition 0."""
        tried.append(list(other))
        return all(other[item] == 0 for item, at in enumerate(where) if at == 0)

    found = improve(items, where, partitions, limits, admits)
    assert score(items, found, partitions, limits) <= score(items, where, partitions, limits)
    assert {*found} == {*where}, "a partition got empty"
    assert all(found[item] == at for item, at in items.fixed.items())
    assert found == where or admits(found)


def chain(where, count=6):
    graph = graph_of([(i, i + 1) for i in range(count - 1)], count)
    items = Items.of(Problem(graph, 2), [Balance("operations", (1,) * count)])
    return improve(items, where, 2, [3], lambda other: True)


def test_an_item_goes_to_its_neighbours():
    assert chain([0, 0, 1, 0, 1, 1]) == [0, 0, 0, 1, 1, 1]


def test_loads_above_the_limit_come_first():
    assert chain([0, 1, 1, 1, 1, 1]) == [0, 0, 0, 1, 1, 1]


def test_a_pass_goes_through_worse_states():
    """Moving 0, 1 or 2 to the partition of 4 gains nothing until others have followed; 3 gets the first one."""
    graph = graph_of([(0, 4), (1, 2), (1, 4)], 5)
    items = Items.of(Problem(graph, 2), [Balance("operations", (1,) * 5)])
    found = improve(items, [0, 0, 0, 0, 1], 2, [4], lambda other: True)
    assert cut_bytes(items.flows, found) == 0
