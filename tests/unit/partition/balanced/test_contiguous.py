"""The least cut of an order into runs, against all cuts of that order."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.partition.balanced.graphs import graph_of, small_graphs
from weft.graph import Graph, Tensor, Unit
from weft.partition import Problem
from weft.partition.balanced.candidate import Balance, cut_bytes
from weft.partition.balanced.contiguous import Runs
from weft.partition.balanced.items import Items


@st.composite
def problems(draw, groups=True):
    """Items of a small graph with two balances, some fixed."""
    graph = draw(small_graphs(8, groups=groups))
    count = draw(st.integers(1, 3))
    weights = st.lists(st.integers(0, 5), min_size=len(graph), max_size=len(graph))
    given_balances = [Balance(name, tuple(draw(weights))) for name in ("operations", "variables")]
    fixed = {}
    if draw(st.booleans()):
        unit = draw(st.sampled_from(graph.units))
        fixed[unit.name] = draw(st.integers(0, count - 1))
    return Items.of(Problem(graph, count, fixed=fixed), given_balances), count


def all_cuts(order, partitions):
    """All ways to give each partition one run, empty ones only if there are too few items."""
    least = len(order) >= partitions
    for inner in itertools.combinations_with_replacement(range(len(order) + 1), partitions - 1):
        cuts = (0, *inner, len(order))
        if not least or all(one < other for one, other in itertools.pairwise(cuts)):
            where = [0] * len(order)
            for partition, (start, end) in enumerate(itertools.pairwise(cuts)):
                for item in order[start:end]:
                    where[item] = partition
            yield where


def loads(weights, where, partitions):
    return [sum(w for w, at in zip(weights, where, strict=True) if at == p) for p in range(partitions)]


def squares(items, where, partitions):
    """The sum of squared shares of all balances."""
    return sum(
        (load / (sum(weights) or 1)) ** 2
        for weights in items.weights
        for load in loads(weights, where, partitions)
    )


def drawn_by(seed):
    """Items with many tensors and groups, sometimes fixed; an order, partitions, limits that often allow a cut."""
    draw = random.Random(seed)
    count, partitions = draw.randint(2, 8), draw.randint(2, 3)
    units = [Unit(f"u{i}", 1, 2, 0, 0, group=draw.choice([None] * 5 + ["a"])) for i in range(count)]
    tensors = [
        Tensor(
            unit.name,
            tuple(other.name for other in units[i + 1 :] if draw.random() < 0.5),
            draw.randint(0, 9),
        )
        for i, unit in enumerate(units)
        for _ in range(2)
    ]
    both = [Balance(name, tuple(draw.randint(0, 5) for _ in units)) for name in "ab"]
    fixed = {draw.choice(units).name: draw.randrange(partitions)} if draw.random() < 0.3 else {}
    items = Items.of(Problem(Graph(units, tensors), partitions, fixed=fixed), both)
    order = draw.sample(range(len(items)), len(items))
    return items, order, partitions, [draw.uniform(0.4, 1.1) * sum(weights) for weights in items.weights]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_the_cut_is_the_least_of_all_cuts_of_the_order(seed):
    """Within both limits, with items fixed; of equal cuts the most even one; None only if no cut is allowed."""
    items, order, partitions, limits = drawn_by(seed)
    allowed = [
        where
        for where in all_cuts(order, partitions)
        if all(where[item] == at for item, at in items.fixed.items())
        and all(
            max(loads(weights, where, partitions)) <= limit
            for weights, limit in zip(items.weights, limits, strict=True)
        )
    ]
    found = Runs(items, order).cut(partitions, limits)
    if not allowed:
        assert found is None
        return
    assert found in allowed
    least = min(cut_bytes(items.flows, where) for where in allowed)
    assert cut_bytes(items.flows, found) == least
    best = min(
        squares(items, where, partitions) for where in allowed if cut_bytes(items.flows, where) == least
    )
    assert abs(squares(items, found, partitions) - best) < 1e-6


@settings(max_examples=100, deadline=None)
@given(problems(groups=False))
def test_orders_are_topological_and_differ(drawn):
    items, _ = drawn
    assert len({*items.orders.values()}) == len(items.orders)
    for order in items.orders.values():
        assert sorted(order) == [*range(len(items))]
        place = {item: number for number, item in enumerate(order)}
        assert all(place[source] < place[target] for source, targets, _ in items.flows for target in targets)


def test_the_orders_of_two_branches():
    """Written in turn: depth first one after the other, and the branch that frees bytes comes first."""
    graph = graph_of([(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)], 6)
    orders = Items.of(Problem(graph, 1), []).orders
    assert orders == {"program order": (0, 1, 2, 3, 4, 5), "depth first": (0, 1, 3, 2, 4, 5)}


def test_few_live_bytes():
    """Of what could run next comes first what frees more bytes than it makes, then what makes fewer."""
    units = graph_of([], 4).units
    tensors = [
        Tensor("u0", ("u1",), 0),
        Tensor("u0", ("u2",), 8),
        Tensor("u1", ("u3",), 2),
        Tensor("u2", ("u3",), 5),
    ]
    assert Items.of(Problem(Graph(units, tensors), 1), []).orders["few live bytes"] == (0, 2, 1, 3)
    tensors = [Tensor("u0", ("u2",), 9), Tensor("u1", ("u2",), 1)]
    assert Items.of(Problem(Graph(units, tensors), 1), []).orders["few live bytes"] == (3, 1, 0, 2)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_orders_with_circles_have_every_item_once(drawn):
    items, _ = drawn
    for order in items.orders.values():
        assert sorted(order) == [*range(len(items))]
