"""A rank that fails in the middle of the sum of a bucket: the job ends soon, and that rank is named first."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_training import KILLED, assert_blames, fault

JOB = Path(__file__).parent / "workers" / "reducing.py"
PATHS = {"shared": "round", "direct": "launched"}
"""Where a sum is interrupted, by what adds up."""


@pytest.mark.parametrize("algorithm", PATHS)
def test_a_rank_killed_in_a_sum_is_named(algorithm: str):
    ended = fault("sigkill", 1, 3, PATHS[algorithm], "--all-reduce", algorithm, ranks=3, job=JOB)
    assert ended.code == 137
    assert_blames(ended, 1, KILLED.format(r"( in step 3.*)?"))


@pytest.mark.parametrize("algorithm", PATHS)
def test_a_rank_that_raises_in_a_sum_is_named(algorithm: str):
    ended = fault("exception", 1, 3, PATHS[algorithm], "--all-reduce", algorithm, ranks=3, job=JOB)
    assert ended.code == 1
    assert_blames(ended, 1, r"failed in step 3.*: InjectedError: injected$")
