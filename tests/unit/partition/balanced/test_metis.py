"""METIS: what it is called with, and what it finds where it is installed."""

from __future__ import annotations

import sys
import types

import pytest

from tests.unit.partition.balanced.graphs import graph_of
from weft.partition import Problem
from weft.partition.balanced import Balance, candidates, metis
from weft.partition.balanced.metis import Adjacency, load

SQUARE = Adjacency(
    starts=(0, 2, 4, 6, 8),
    neighbours=(1, 3, 0, 2, 1, 3, 0, 2),
    bytes=(9, 1, 9, 1, 1, 9, 1, 9),
    weights=((1, 1, 1, 1), (1, 3, 3, 1)),
    tolerances=(0.125, 0.5),
)


def test_the_arguments_of_the_call():
    """Weights of both balances vertex by vertex, as METIS wants them; tolerances as factors."""
    seen = {}

    def call(
        count,
        balances,
        starts,
        neighbours,
        weights,
        sizes,
        edges,
        parts,
        shares,
        factors,
        options,
        cut,
        where,
    ):
        seen.update(
            count=[*count], balances=[*balances], starts=[*starts], neighbours=[*neighbours], weights=[*weights],
            edges=[*edges], parts=[*parts], factors=[*factors], none=[sizes, shares, options],
        )  # fmt: skip
        where[:] = [0, 0, 1, 1]
        return 1

    assert metis._call(call, SQUARE, 2) == [0, 0, 1, 1]
    assert seen["count"] == [4] and seen["balances"] == [2] and seen["parts"] == [2]
    assert seen["starts"] == [*SQUARE.starts] and seen["neighbours"] == [*SQUARE.neighbours]
    quarter, eighth = 250_000, 125_000
    assert seen["weights"] == [quarter, eighth, quarter, 3 * eighth, quarter, 3 * eighth, quarter, eighth]
    assert seen["edges"] == [225_000, 25_000] * 2 + [25_000, 225_000] * 2
    assert seen["factors"] == [1.125, 1.5] and seen["none"] == [None, None, None]


def test_what_metis_refuses_is_no_placement():
    assert metis._call(lambda *given: -3, SQUARE, 2) == []
    graph = graph_of([(0, 1)], 2)
    found = candidates(Problem(graph, 2), [Balance("operations", (1, 1))], cut_graph=lambda graph, count: [])
    assert not any("METIS" in one.name for one in found)


@pytest.mark.parametrize(
    "module", [None, types.SimpleNamespace(__file__="/nowhere/_internal.so"), types.SimpleNamespace()]
)
def test_without_metis_there_is_nothing_to_call(monkeypatch, module):
    """Not installed; a file that is not there; a module without one."""
    monkeypatch.setitem(sys.modules, "pymetis._internal", module)
    assert load() is None


def test_the_graph_that_metis_gets():
    """Every tensor is an edge both ways, with the bytes of all tensors between the two."""
    graph = graph_of([(0, 1), (0, 1), (1, 2)], 3)
    asked = []

    def cut_graph(adjacency, partitions):
        asked.append((adjacency, partitions))
        return [1, 0, 0]

    found = candidates(
        Problem(graph, 2), [Balance("a", (1, 2, 3), 0.25), Balance("b", (1, 1, 1))], cut_graph=cut_graph
    )
    assert asked == [
        (Adjacency((0, 1, 3, 4), (1, 0, 2, 1), (16, 16, 8, 8), ((1, 2, 3), (1, 1, 1)), (0.25, 0.1)), 2)
    ]
    where = {one.name: one.partitions for one in found}
    assert where["METIS"] == (0, 1, 1), "partitions are in the order of their first visits"


@pytest.mark.skipif(load() is None, reason="pymetis is not installed")
def test_metis_balances_both():
    found = load()(SQUARE, 2)
    assert found[0] == found[1] != found[2] == found[3]
