"""The placement that minimises the largest partition, exactly, over units in program order.

Units form a chain: partition 0 gets the first of them, partition 1 the next, and so on. Units of one
group (they share a parameter) must lie together: `links` says how they stay out of the chain's way. What
such groups bring to a partition is its *base load*. `cut` solves one choice for them exactly, and `search`
tries every choice, so the result is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from weft.errors import PlacementError
from weft.partition.chain.cut import Cut
from weft.partition.chain.links import Chain, Choice, make_links
from weft.partition.chain.search import Search

EFFORT = 20_000
"""Starts that are compared to choose between equally balanced cuts; more than that are narrowed down first."""


def split(
    costs: Sequence[float],
    partitions: int,
    groups: Sequence[int | str | None] | None = None,
    fixed: Mapping[int, int] | None = None,
) -> list[int]:
    """The partition of every unit, so that the largest partition's cost is as small as it can be.

    A partition stays empty only where too few units (a group counts as one) or `fixed` leave no choice.
    Of equally good placements the one is taken with fewer crossings (neighbours in the program on different
    partitions), then by the smaller sum of squared loads, then by the lower numbers. (Where more than
    `EFFORT` starts could be part of an equally good cut, only those around an even one are compared.) With
    more than `search.COMBINATIONS` choices for spread groups these are moved one at a time for as long as
    that helps (coordinate descent), and the result may miss the optimum.

    Args:
        costs: What each unit costs, in program order.
        partitions: How many partitions there are.
        groups: A number for each unit: units with the same one lie together; None for a unit on its own.
        fixed: Unit index to the partition that it must go to.

    >>> split([1, 1, 1, 3], partitions=2)
    [0, 0, 0, 1]
    >>> split([1, 2, 2, 2, 2, 1], partitions=2, groups=[7, None, None, None, None, 7])
    [0, 0, 0, 1, 1, 0]
    """
    groups = [None] * len(costs) if groups is None else groups
    fixed = {} if fixed is None else fixed
    _check_arguments(costs, partitions, groups, fixed)
    if not costs:
        return []
    found = search_chain(costs, Chain(make_links(groups, fixed), partitions)).run(EFFORT)
    assert found is not None  # a single partition could hold everything
    return found[0]


def search_chain(costs: Sequence[float], chain: Chain) -> Search:
    """The search for the placement of units that cost the same wherever they lie."""
    link_costs = [link.sum(costs) for link in chain.chain]
    spread_costs = [link.sum(costs) for link in chain.spread]

    def cutter(choice: Choice, full: bool) -> Cut:
        base = [0.0] * chain.partitions
        for cost, partition in zip(spread_costs, choice, strict=True):
            base[partition] += cost
        required = [full and partition not in choice for partition in range(chain.partitions)]
        beside = [(number, choice[group]) for number, group in chain.beside]
        return Cut(link_costs, base, required, chain.windows, chain.joined, beside)

    def rank(placement: Sequence[int]) -> tuple[int, float, list[int]]:
        loads = [0.0] * chain.partitions
        for cost, partition in zip(costs, placement, strict=True):
            loads[partition] += cost
        return crossings(placement), sum(load * load for load in loads), list(placement)

    return Search(chain, cutter, rank, lambda: shares_before(costs, chain))


def crossings(placement: Sequence[int]) -> int:
    """The number of neighbours in the program that lie on different partitions."""
    return sum(one != other for one, other in itertools.pairwise(placement))


def shares_before(costs: Sequence[float], chain: Chain) -> list[int]:
    """For each spread group the partition that its middle unit would lie on, were the loads even."""
    total = sum(costs)
    before = list(itertools.accumulate(costs, initial=0.0))
    middles = [before[link.units[len(link.units) // 2]] / total if total else 0.0 for link in chain.spread]
    return [min(int(share * chain.partitions), chain.partitions - 1) for share in middles]


def _check_arguments(
    costs: Sequence[float], partitions: int, groups: Sequence[int | str | None], fixed: Mapping[int, int]
) -> None:
    faults = []
    if partitions < 1:
        faults.append(f"partitions is {partitions}, it must be at least 1")
    if len(groups) != len(costs):
        faults.append(f"groups has {len(groups)} entries for {len(costs)} units")
    for unit, cost in enumerate(costs):
        if not 0.0 <= cost < math.inf:
            faults.append(f"the cost of unit {unit} is {cost}, it must be a number of at least 0")
    for unit, partition in fixed.items():
        if not 0 <= unit < len(costs):
            faults.append(f"fixed names unit {unit}, but there are {len(costs)} units")
        if not 0 <= partition < partitions:
            faults.append(f"fixed puts unit {unit} on partition {partition}, but there are {partitions}")
    if faults:
        raise PlacementError("; ".join(faults))
