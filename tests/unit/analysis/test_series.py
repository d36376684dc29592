"""Robust measures: a few wild values do not move them, and few values are no fault."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.analysis.series import MOST_POINTS, deviation, median, outliers, quantile, thinned, trend
from weft.errors import UsageError


def test_nothing_is_said_of_nothing():
    assert all(math.isnan(each) for each in (median([]), deviation([]), quantile([math.nan], 0.5)))
    assert all(math.isnan(each) for each in (*trend([1.0]), *trend([1.0, 2.0], [3, 3])))
    assert outliers([]) == []


def test_values_that_are_no_numbers_are_left_out():
    values = [1.0, math.nan, 3.0, math.inf, 2.0]
    assert (median(values), deviation(values), quantile(values, 1.0)) == (2.0, 1.0, 3.0)


def test_a_share_outside_of_0_to_1_is_refused():
    with pytest.raises(UsageError, match=r"asked for at 95, it must be a share"):
        quantile([1.0], 95)


def test_one_position_for_each_value():
    with pytest.raises(UsageError, match="2 values at 1 positions"):
        trend([1.0, 2.0], [0])


def test_a_series_without_noise_needs_a_share_to_have_outliers():
    values = [1.0] * 9 + [1.001, 5.0]
    assert outliers(values) == [9, 10]
    assert outliers(values, least=0.05) == [10]


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.sets(st.integers(0, 39), max_size=9))
def test_a_fifth_of_the_values_may_be_anything(slope: float, start: float, wild: set[int]):
    values = [1e6 if x in wild else start + slope * x for x in range(40)]
    found = trend(values)
    assert found.slope == pytest.approx(slope, abs=1e-6)
    assert found.at(20) == pytest.approx(start + 20 * slope, abs=1e-3)


def test_a_long_series_has_the_slope_of_a_sample():
    values = [3.0 * x + (x % 2) for x in range(100_000)]
    assert len(thinned(values, MOST_POINTS)) == MOST_POINTS
    assert trend(values).slope == pytest.approx(3.0, rel=1e-3)


@given(st.lists(st.integers(), max_size=30), st.integers(2, 20))
def test_a_sample_keeps_the_ends(values: list[int], most: int):
    found = thinned(values, most)
    assert len(found) == min(len(values), most)
    assert found[:1] == values[:1] and found[-1:] == values[-1:]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_among_the_values(values: list[float], share: float):
    assert min(values) <= quantile(values, share) <= max(values)
