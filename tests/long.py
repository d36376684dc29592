"""What `make test` leaves to `make test-long`: single tests that take long, and most of a long list of alike cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

long = pytest.mark.long


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all the cases, of which each `every`-th, from the first on, is not marked as long.

    >>> [bool(each.marks) for each in one_in(2, ["a", "b", "c"])]
    [False, True, False]
    """
    found = []
    for at, case in enumerate(cases):
        more = [long] if at % every else []
        if isinstance(case, type(pytest.param())):
            found.append(pytest.param(*case.values, marks=[*case.marks, *more], id=case.id))
        else:
            found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=more))
    return found


def first_of(cases: list[Any]) -> list[Any]:
    """Parameters of a test that goes through all of the cases it gets: the first one, and, marked as long, all of them.

    >>> [each.values for each in first_of(["a", "b"])]
    [(['a'],), (['a', 'b'],)]
    """
    return [pytest.param(cases[:1]), pytest.param(cases, marks=long)]
