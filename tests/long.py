"""Tests that `make test` leaves to `make test-long`: some that take long, and most of a long list of alike cases.

Which cases of a list, and which of some long tests, `make test` runs is drawn anew each day. The seed is told in the
first lines of a run, and the same seed draws the same: `TEST_SEED=20261128 make test`.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

SEED = "TEST_SEED"
"""The variable with the seed; `tests/conftest.py` sets it, so that all processes of a run draw alike."""

Case = TypeVar("Case")

long = pytest.mark.long


def seed() -> str:
    """The seed that cases are drawn by: what the variable has, else today's date."""
    return os.environ.get(SEED) or datetime.date.today().strftime("%Y%m%d")


def drawn(every: int, cases: Sequence[Case]) -> list[Case]:
    """One in `every` of the cases, at least one, in their order.

    >>> len(drawn(2, range(5))), drawn(9, "x"), drawn(1, "abc")
    (3, ['x'], ['a', 'b', 'c'])
    """
    chosen = random.Random(f"{seed()} {every} {len(cases)}").sample(
        range(len(cases)), -(-len(cases) // every)
    )
    return [cases[at] for at in sorted(chosen)]


def one_day_in(days: int) -> Any:
    """A decorator for a test that takes long: `make test` runs it on one day in so many, by its name."""

    def decorate(test: Any) -> Any:
        return test if random.Random(f"{seed()} {test.__qualname__}").randrange(days) == 0 else long(test)

    return decorate


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all the cases, of which those that are not drawn are marked as long.

    >>> sorted(bool(each.marks) for each in one_in(2, ["a", "b", "c"]))
    [False, False, True]
    """
    given = list(cases)
    short = drawn(every, range(len(given)))
    found = []
    for at, case in enumerate(given):
        more = [] if at in short else [long]
        if isinstance(case, type(pytest.param())):
            found.append(pytest.param(*case.values, marks=[*case.marks, *more], id=case.id))
        else:
            found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=more))
    return found


def some_of(every: int, layouts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test that runs the checks (a list at the end) of each layout: some of them, and, as long, all.

    Some are one in `every`, in the first layout and in one of the others: a check may compare two.

    >>> some, whole = some_of(2, [(4, ["a", "b"]), (2, ["a", "b"])])
    >>> [len(checks) for _, checks in some.values[0]], len(whole.values[0])
    ([1, 1], 2)
    """
    two = [*layouts[:1], *drawn(len(layouts), layouts[1:])]
    names = drawn(every, [*dict.fromkeys(name for *_, checks in two for name in checks)])
    some = [(*layout, [name for name in checks if name in names]) for *layout, checks in two]
    return [pytest.param([each for each in some if each[-1]]), pytest.param(layouts, marks=long)]
