"""Candidates by two balances: against all placements of small graphs, with groups, fixed units and known models."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.partition.balanced.graphs import densenet121, gpt, graph_of, resnet50, small_graphs
from weft.errors import PlacementError
from weft.graph import Graph, Tensor, Unit
from weft.partition import Problem
from weft.partition.balanced import Balance, balances, candidates, cut_bytes, stages_of_placement
from weft.partition.balanced.candidate import LOOSE, TIGHT
from weft.plan.best_candidate import best_by_step
from weft.simulate import Links
from weft.topology.cluster import Link

LINKS = Links.uniform(Link.parse("1GB/s,100us"), overhead_s=50e-6)


def test_the_two_balances():
    graph = graph_of([(0, 1)], 2)
    operations, variables = balances(graph, [3, 4], [1, 0], "speed")
    assert (operations.weights, operations.tolerance) == ((3, 4), TIGHT)
    assert (variables.weights, variables.tolerance) == ((1, 0), TIGHT)
    held, operations = balances(graph, [3, 4], [1, 0], "memory")
    assert (held.weights, held.tolerance) == ((100, 100), TIGHT)
    assert (operations.weights, operations.tolerance) == ((3, 4), LOOSE)
    with pytest.raises(PlacementError) as raised:
        balances(graph, [3], [1, 0], "auto")
    assert str(raised.value) == (
        'optimize is "auto": write "speed" or "memory"; operations has 1 numbers, but there are 2 units: '
        "give one for each unit"
    )


def test_nothing_to_balance_is_balanced():
    assert Balance("variables", (0, 0)).imbalance([0, 1], 2) == 1.0


@settings(max_examples=100, deadline=None)
@given(small_graphs(7, groups=True), st.integers(1, 3), st.data())
def test_no_candidate_cuts_fewer_bytes_than_all_placements_allow(graph, partitions, data):
    """And each respects groups and fixed units, counts what it says, and is found by trying everything."""
    weights = st.lists(st.integers(1, 5), min_size=len(graph), max_size=len(graph))
    given_balances = [Balance(name, tuple(data.draw(weights))) for name in ("a", "b")]
    fixed = {}
    if data.draw(st.booleans()):
        fixed = {data.draw(st.sampled_from(graph.units)).name: data.draw(st.integers(0, partitions - 1))}
    problem = Problem(graph, partitions, fixed=fixed)
    found = candidates(problem, given_balances)
    for one in found:
        for group in graph.groups.values():
            assert len({one.partitions[unit] for unit in group}) == 1
        assert all(one.partitions[graph.index[name]] == at for name, at in fixed.items())
        worst = [balance.imbalance(one.partitions, partitions) for balance in given_balances]
        assert [share for _, share in one.imbalances] == worst
        least = min(
            cut_bytes(graph.flows, where)
            for where in itertools.product(range(partitions), repeat=len(graph))
            if all(len({where[unit] for unit in group}) == 1 for group in graph.groups.values())
            and all(where[graph.index[name]] == at for name, at in fixed.items())
            and all(
                balance.imbalance(where, partitions) <= share + 1e-9
                for balance, share in zip(given_balances, worst, strict=True)
            )
        )
        assert one.cut_bytes == cut_bytes(graph.flows, one.partitions) >= least


def test_tolerances_decide_between_bytes_and_balance():
    """The cheap cut is uneven: it is taken only where tolerances allow it, or nothing else is possible."""
    units = [Unit(f"u{i}", 1.0, 2.0, 100, 16) for i in range(10)]
    tensors = [Tensor(f"u{i}", (f"u{i + 1}",), 1 if i == 6 else 8) for i in range(9)]
    graph = Graph(units, tensors)

    def first(tolerance):
        return candidates(Problem(graph, 2), [Balance("a", (1,) * 10, tolerance)])[0].partitions.index(1)

    assert first(0.1) == 5 and first(0.5) == 7


def test_a_group_whose_units_are_apart():
    """A tied embedding and head: one partition, which a microbatch visits twice."""
    units = [Unit(f"u{i}", 1.0, 2.0, 0, 0, group="tied" if i in (0, 5) else None) for i in range(6)]
    graph = Graph(units, [Tensor(f"u{i}", (f"u{i + 1}",), 8) for i in range(5)])
    found = candidates(Problem(graph, 2), [Balance("operations", (1,) * 6)])
    assert all(one.partitions[0] == one.partitions[5] for one in found)
    assert all(sorted(one.partitions).count(0) == 3 for one in found[:1])
    with pytest.raises(
        PlacementError, match="no placement keeps each partition one run of units with these fixed"
    ):
        candidates(Problem(graph, 2), [Balance("operations", (1,) * 6)], contiguous=True)


def test_fixed_units_in_descending_order():
    """No runs are possible, but placements are."""
    graph = graph_of([(i, i + 1) for i in range(5)], 6)
    problem = Problem(graph, 2, fixed={"u0": 1, "u5": 0})
    for one in candidates(problem, [Balance("operations", (1,) * 6)]):
        assert one.partitions[0] == 1 and one.partitions[5] == 0


def test_a_script_that_places_everything_is_obeyed():
    graph = graph_of([(0, 1), (1, 2)], 3)
    found = candidates(
        Problem(graph, 2, fixed={"u0": 1, "u1": 0, "u2": 1}), [Balance("operations", (1, 1, 1))]
    )
    assert {one.partitions for one in found} == {(1, 0, 1)}


def test_faults_of_balances_and_fixed_units():
    units = [Unit(name, 1.0, 2.0, 0, 0, group="g") for name in "ab"]
    with pytest.raises(PlacementError, match='units of group "g" on the partitions 0, 1: give them one'):
        candidates(Problem(Graph(units), 2, fixed={"a": 0, "b": 1}), [])
    with pytest.raises(PlacementError) as raised:
        candidates(Problem(Graph(units), 2), [Balance("operations", (1,)), Balance("variables", (-1, 1))])
    assert str(raised.value) == (
        "the balance of operations has 1 weights, but there are 2 units: give one for each unit; "
        "the balance of variables has the weight -1, it must be finite and not negative"
    )


def test_fewer_units_than_partitions():
    found = candidates(Problem(graph_of([(0, 1)], 2), 4), [Balance("operations", (1, 1))])
    assert sorted(found[0].partitions) == [*found[0].partitions]
    (found,) = candidates(Problem(Graph(()), 2), [Balance("operations", ())])
    assert found.partitions == ()


def zigzag(adjacency, partitions):
    """A stand-in for METIS that deals out vertices in turn."""
    return [vertex % partitions for vertex in range(len(adjacency))]


@pytest.mark.parametrize("model", [resnet50, densenet121, gpt])
@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_known_models(model, optimize):
    """The best is not worse than the contiguous cut; moves keep the number of stages; runs are runs."""
    net = model()
    graph, partitions = net.graph(), 4
    given_balances = balances(graph, net.operations, net.variables, optimize)
    found = candidates(Problem(graph, partitions), given_balances, cut_graph=zigzag)
    best = best_by_step(graph, found, partitions, 8, LINKS)
    straight = candidates(Problem(graph, partitions), given_balances, contiguous=True)
    for one in straight:
        assert stages_of_placement(graph, one.partitions)[1] == (0, 1, 2, 3)
        assert best.chosen.step_s <= best_by_step(graph, [one], partitions, 8, LINKS).chosen.step_s * (
            1 + 1e-9
        )
    assert max(share for _, share in found[0].imbalances) < (1.2 if optimize == "speed" else 2.2)
    by_name = {one.name: one for one in found}
    raw, moved = by_name["METIS"], by_name["METIS, moves"]
    assert len(stages_of_placement(graph, moved.partitions)[1]) <= len(
        stages_of_placement(graph, raw.partitions)[1]
    )


@settings(max_examples=40, deadline=None)
@given(small_graphs(8), st.integers(1, 3), st.data())
def test_the_best_is_never_worse_than_the_contiguous_cut(graph, partitions, data):
    counts = st.lists(st.integers(0, 5), min_size=len(graph), max_size=len(graph))
    given_balances = balances(graph, data.draw(counts), data.draw(counts), "speed")
    found = candidates(Problem(graph, partitions), given_balances, cut_graph=zigzag)
    alone = best_by_step(graph, found[:1], partitions, 4, LINKS).chosen.step_s
    assert best_by_step(graph, found, partitions, 4, LINKS).chosen.step_s <= alone * (1 + 1e-9)
