"""What a partitioner must find, by trying everything and by an integer program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hypothesis import strategies as st
from ortools.sat.python import cp_model

from weft.graph import Graph, Tensor, Unit
from weft.partition import Device, Placement, Problem, in_flight

SCALE = 4
"""Speeds are 1, 2 and 4, so that times SCALE all times are whole."""


def whole_ms(size: float) -> float:
    """Seconds of a transfer, so that the two directions take `size` milliseconds."""
    return size / 2e3


@st.composite
def problems(draw, units=6, partitions=3, chunks=1, transfers=True, limits=True, devices=True, groups=True):
    """Small problems with whole costs. About every third one has memory limits too tight for any placement."""
    n = draw(st.integers(1, units))
    count = draw(st.integers(1, partitions))
    small = st.integers(0, 9)
    names = [None, None, None, "a", "b"] if groups else [None]
    group = draw(st.lists(st.sampled_from(names), min_size=n, max_size=n))
    graph_units = [
        Unit(f"u{i}", draw(small), draw(small), draw(small), draw(small), draw(small), group=group[i])
        for i in range(n)
    ]
    tensors = None
    if n > 1 and draw(st.booleans()):
        tensors = []
        for source in range(n - 1):
            targets = draw(st.sets(st.integers(source + 1, n - 1), max_size=3))
            tensors.append(Tensor(f"u{source}", tuple(f"u{t}" for t in sorted(targets)), draw(small)))
    layout = draw(st.sampled_from(["looped", "v"]))
    chunks = draw(st.integers(2, chunks)) if chunks > 1 else 1
    graph = Graph(graph_units, tensors)
    total = sum(4 * unit.parameter_bytes + 2 * unit.activation_bytes for unit in graph)
    return Problem(
        graph,
        count,
        chunks=chunks,
        layout=layout,
        devices=tuple(
            Device(
                draw(st.sampled_from([1.0, 1.0, 2.0, 4.0])) if devices else 1.0,
                draw(st.integers(total // (2 * count), total))
                if limits and draw(st.booleans())
                else math.inf,
            )
            for _ in range(count)
        ),
        transfer_s=whole_ms if transfers and draw(st.booleans()) else None,
        in_flight=in_flight(count, draw(st.integers(1, 4)), chunks, layout),
    )


def legal(problem: Problem) -> Iterator[Placement]:
    """Every placement that follows the program and keeps within the limits."""
    chain = problem.chain
    every = range(problem.segments)
    spread = [every if link.fixed is None else [link.fixed] for link in chain.spread]
    for segments in itertools.combinations_with_replacement(every, len(chain.chain)):
        if any(
            link.fixed not in (None, segment) for link, segment in zip(chain.chain, segments, strict=True)
        ):
            continue
        for choice in itertools.product(*spread):
            placed = [0] * len(problem.graph)
            for link, segment in [
                *zip(chain.chain, segments, strict=True),
                *zip(chain.spread, choice, strict=True),
            ]:
                for unit in link.units:
                    placed[unit] = segment
            placement = Placement(problem, tuple(placed))
            if not placement.excess_bytes:
                yield placement


def exhaustive(problem: Problem, empty: bool = True) -> float | None:
    """The smallest largest cost, of placements that leave no segment empty if there are any; None if none.

    With `empty` False segments may be empty only if there are fewer units than segments.
    """
    best: set[tuple[bool, float]] = {
        (len(set(placement.segments)) < problem.segments, placement.largest_cost)
        for placement in legal(problem)
    }
    if not empty and len(problem.graph) >= problem.segments:
        best = {pair for pair in best if not pair[0]}
    return min(best)[1] if best else None


def integer_program(problem: Problem) -> float | None:
    """The smallest largest time in ms, of placements without an empty partition; None if there are none."""
    graph, count = problem.graph, problem.partitions
    chain = problem.chain
    spread = {unit for link in chain.spread for unit in link.units}
    model = cp_model.CpModel()
    on = [[model.new_bool_var(f"{unit.name} on {p}") for p in range(count)] for unit in graph]
    at = [sum(p * on[unit][p] for p in range(count)) for unit in range(len(graph))]
    for row in on:
        model.add_exactly_one(row)
    for link in chain.links:
        for unit in link.units[1:]:
            model.add(at[unit] == at[link.units[0]])
    for one, other in itertools.pairwise(chain.chain):
        model.add(at[one.units[-1]] <= at[other.units[0]])
    loads = [
        sum(round(SCALE * unit.time_ms / problem.devices[p].speed) * on[i][p] for i, unit in enumerate(graph))
        for p in range(count)
    ]
    for p, device in enumerate(problem.devices):
        model.add(sum(row[p] for row in on) >= 1)
        if device.memory_bytes < math.inf:
            sizes = [
                4 * unit.parameter_bytes + problem.in_flight[p] * unit.activation_bytes for unit in graph
            ]
            model.add(
                sum(size * row[p] for size, row in zip(sizes, on, strict=True)) <= int(device.memory_bytes)
            )
    for source, targets, size in graph.flows if problem.transfer_s is not None else ():
        together = [] if source in spread else [target for target in targets if target not in spread]
        for ends in [together, *([target] for target in targets if target not in together)]:
            for p in range(count):
                gets, sends = model.new_bool_var(""), model.new_bool_var("")
                for target in ends:
                    model.add(gets >= on[target][p] - on[source][p])
                    model.add(sends >= on[source][p] - on[target][p])
                loads[p] += SCALE * size * (gets + sends)
    largest = model.new_int_var(0, 10**9, "largest")
    for load in loads:
        model.add(largest >= load)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # else SIGINT would end this process from then on
    status = solver.solve(model)
    return solver.objective_value / SCALE if status == cp_model.OPTIMAL else None
