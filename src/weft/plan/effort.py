"""The options that are simulated to choose a schedule: what is worth most first, up to a number of actions.

A search over 64 ranks and 256 microbatches would simulate ten million actions, for minutes. Up to `ACTIONS` everything
is tried. Beyond that options are taken in this order for as long as their actions add up to no more:

    1  schedules with a pattern, as they are       2  list scheduling
    3  the same with activations computed anew or fewer active microbatches: they only save memory

With a limit on memory 3 comes before 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import ScheduleError
from weft.plan.option import Option
from weft.schedule.generators.greedy import LEADERS, POLICIES, TRIED

ACTIONS = 500_000
"""Actions that a search simulates at most; about 60 microseconds each."""
FIRST = ("1f1b", "zb_h1", "zbv", "interleaved_1f1b", "v_half", "gpipe")
"""Schedules in the order in which they are taken."""
TOO_MANY = "not tried: too much to simulate at this size"


def actions_of(option: Option, ranks: int, microbatches: int) -> int:
    """About how many actions are simulated for an option; none if it cannot be for so many ranks.

    >>> actions_of(Option("1f1b"), 4, 8), actions_of(Option("interleaved_1f1b", chunks=2), 4, 8)
    (64, 128)
    """
    try:
        visits = len(option.layout(ranks)) * microbatches
    except ScheduleError:
        return 0
    if option.like is None:
        return visits * (3 if option.schedule.startswith(("zb", "v_")) else 2)
    few = min(1.0, max(TRIED, 2 * ranks) / microbatches)
    policies = len(POLICIES) + (6 * LEADERS if option.splits else 0)
    return round(visits * 3 * (1 + policies * few))


def affordable(
    options: Sequence[Option], ranks: int, microbatches: int, limited: bool, most: int = ACTIONS
) -> list[Option]:
    """The options that are tried, in the order in which they were given.

    Args:
        options: All that could be.
        ranks: How many ranks there are.
        microbatches: How many microbatches make the step.
        limited: Whether ranks have a limit on memory.
        most: How many actions may be simulated. The first option is tried in any case.
    """
    if len(options) == 1:
        return list(options)
    costs = [actions_of(option, ranks, microbatches) for option in options]
    if sum(costs) <= most:
        return list(options)

    def worth(at: int) -> tuple[int, int, int]:
        option = options[at]
        saves = option.recompute or option.active is not None
        listed = option.like is not None
        known = FIRST.index(option.schedule) if option.schedule in FIRST else len(FIRST)
        return (2 * listed + saves if limited else listed + 2 * saves), known, costs[at]

    taken: set[int] = set()
    spent = 0
    for at in sorted(range(len(options)), key=worth):
        if not taken or spent + costs[at] <= most:
            taken.add(at)
            spent += costs[at]
    return [option for at, option in enumerate(options) if at in taken]
