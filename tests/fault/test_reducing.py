"""A rank that fails in the middle of the sum of a bucket: the job ends soon, and that rank is named first."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_training import KILLED, assert_blames, fault

JOB = Path(__file__).parent / "workers" / "reducing.py"
PATHS = {
    "shared": (3, "round", "--all-reduce", "shared"),
    "direct": (3, "launched", "--all-reduce", "direct"),
    "hierarchical": (4, "between", "--all-reduce", "hierarchical"),
    "hierarchical int8": (4, "between", "--all-reduce", "hierarchical", "--compression", "int8"),
}
"""Ranks, where a sum is interrupted, and what adds up."""


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_killed_in_a_sum_is_named(path: str):
    ranks, *given = PATHS[path]
    ended = fault("sigkill", 1, 3, *given, ranks=ranks, job=JOB)
    assert ended.code == 137
    assert_blames(ended, 1, KILLED.format(r"( in step 3.*)?"))


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_raises_in_a_sum_is_named(path: str):
    ranks, *given = PATHS[path]
    ended = fault("exception", 1, 3, *given, ranks=ranks, job=JOB)
    assert ended.code == 1
    assert_blames(ended, 1, r"failed in step 3.*: InjectedError: injected$")
