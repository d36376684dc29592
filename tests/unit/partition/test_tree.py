"""The tree algorithm: its levels, its division of devices, and how it compares with the exact one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PlacementError
from weft.graph import Graph, Unit, transformer
from weft.partition import Problem, place
from weft.partition.tree import dhondt


def graph(**times):
    return Graph(Unit(name.replace("_", "."), time, 0.0, 0, 0) for name, time in times.items())


@pytest.mark.parametrize(
    ("votes", "seats", "expected"),
    [
        ([100, 80, 30, 20], 8, [4, 3, 1, 0]),  # quotients 100 80 50 40 33 30 27 25
        ([340, 280, 160, 60, 15], 7, [3, 3, 1, 0, 0]),
        ([1, 1], 3, [2, 1]),
        ([0, 0], 2, [2, 0]),
    ],
)
def test_dhondt(votes, seats, expected):
    assert dhondt(votes, seats) == expected


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 12))
def test_dhondt_takes_the_largest_quotients(votes, seats):
    quotients = sorted((-vote / n, i) for i, vote in enumerate(votes) for n in range(1, seats + 1))[:seats]
    assert dhondt(votes, seats) == [sum(i == winner for _, winner in quotients) for i in range(len(votes))]


def test_a_flat_model_is_cut_once():
    times = {f"u{i}": time for i, time in enumerate([3, 1, 2, 2, 1, 3])}
    problem = Problem(graph(**times), 3)
    assert place(problem, "tree").partitions == place(problem).partitions == (0, 0, 1, 1, 2, 2)


def test_devices_go_to_the_heavy_subtree():
    """a.0 to a.3 cost 8 of 10: of four devices `a` gets all, is opened, and the rest goes to the first."""
    problem = Problem(graph(a_0=2, a_1=2, a_2=2, a_3=2, b=1, c=1), 4)
    assert place(problem, "tree").partitions == (0, 1, 2, 3, 0, 0)


def test_a_node_is_not_opened_for_one_device():
    problem = Problem(graph(a_0=1, a_1=3, b_0=3, b_1=1), 2)
    assert place(problem, "tree").partitions == (0, 0, 1, 1)


def test_a_leaf_takes_the_first_of_its_devices():
    assert place(Problem(graph(a=9, b=1), 3), "tree").partitions == (0, 0)


def test_a_unit_may_have_others_below_its_name():
    problem = Problem(graph(a_0=1, a=1, a_1=1, a_2=1), 2)
    assert place(problem, "tree").partitions == (0, 0, 1, 1)


def test_groups_go_where_their_first_unit_goes():
    units = [
        Unit("embedding", 1, 0, 0, 0, group="tied"),
        *graph(a_0=3, a_1=3),
        Unit("head", 1, 0, 0, 0, group="tied"),
    ]
    assert place(Problem(Graph(units), 2), "tree").partitions == (0, 0, 1, 0)


def test_blocks_of_a_transformer_are_shared_out():
    """The root's one heavy child gets all devices; embedding and head lie on the first, beside its blocks."""
    described = transformer(24, 1024, 16, 4096, 50000, 1024)
    problem = Problem(described, 4)
    tree, exact = place(problem, "tree"), place(problem)
    assert tree.partitions[0] == tree.partitions[-1] == 0
    assert [tree.partitions[1:-1].count(p) for p in range(4)] == [6, 6, 6, 6]
    assert exact.largest_ms < tree.largest_ms


@pytest.mark.parametrize("arguments", [{"chunks": 2}, {"fixed": {"a": 0}}])
def test_refused(arguments):
    name = next(iter(arguments))
    with pytest.raises(
        PlacementError, match=f'the algorithm "tree" has no {name}: leave {name} out, or take'
    ):
        place(Problem(graph(a=1), 2, **arguments), "tree")
