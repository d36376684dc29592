"""More ranks: throughput against linear, where the rest went, and from where on more do not help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.measured import samples_of
from weft.analysis.run import Run
from weft.analysis.scaling import Fit, limit_of, scale
from weft.errors import UsageError
from weft.timeline import Timeline


def copies(number: int, reduce_s: float = 0.0, **more: object) -> Analysis:
    return Analysis(Recorded(1, 4, number, reduce_s=reduce_s, **more).run(f"{number} copies"))  # type: ignore[arg-type]


def test_copies_whose_sums_take_longer():
    found = scale([copies(4, reduce_s=3.0), copies(1), copies(2, reduce_s=1.0)])
    one, two, four = found.rows
    assert [row.ranks for row in found.rows] == [1, 2, 4]
    assert (one.efficiency, one.largest) == (1.0, "")
    assert two.efficiency == pytest.approx(12 / 13) and two.lost["reduce"] == pytest.approx(1 / 13)
    assert four.efficiency == pytest.approx(12 / 15) and four.lost["reduce"] == pytest.approx(3 / 15)
    assert four.samples_s == pytest.approx(4 * 32 / 15) and four.linear == pytest.approx(4 * 32 / 12)
    assert "80% of what 4 times 1 would do; most is lost to reduce (20% of the ranks' time)" in found.text


def test_a_pipeline_has_the_samples_of_one_mini_batch():
    found = scale(
        [Analysis(Recorded(1, 4).run()), Analysis(Recorded(2, 4, forward_s=0.5, backward_s=1.0).run())]
    )
    assert found.rows[1].efficiency == pytest.approx(12 / 15)
    assert sum(found.rows[1].lost.values()) == pytest.approx(3 / 15)


@pytest.mark.parametrize("axis", ["tensor_parallel_degree", "context_parallel_degree"])
def test_ranks_that_share_a_copy_have_the_samples_of_one(axis: str):
    run = Recorded(1, 4, 4).run()
    facts = {
        rank: replace(each, rdp_rank=rank // 2, settings={**each.settings, axis: 2})
        for rank, each in run.facts.items()
    }
    assert samples_of(Analysis(run)) == 4 * 32
    assert samples_of(Analysis(replace(run, facts=facts))) == 2 * 32


def test_linear_scaling_has_no_limit():
    found = scale([copies(1), copies(2), copies(4)])
    assert found.limit is None and found.rows[-1].efficiency == pytest.approx(1.0)
    assert found.text.endswith("would do.")


def test_the_limit_is_where_one_more_rank_gives_half_of_its_own():
    found = scale([copies(number, reduce_s=1.2 * number) for number in (1, 2, 4)])
    alone, shared = found.fit
    assert (alone, shared) == (pytest.approx(12 / 32), pytest.approx(1.2 / 32))
    assert found.limit is not None
    more = [n / (alone + shared * n) for n in (found.limit - 1, found.limit, found.limit + 1)]
    own = 1 / (alone + shared)
    assert more[2] - more[1] < own / 2
    assert f"From {found.limit} ranks on" in found.text


@given(st.floats(0.01, 10), st.floats(1e-4, 10), st.integers(1, 8))
def test_before_the_limit_a_rank_gives_more_than_half(alone: float, shared: float, first: int):
    limit = limit_of(Fit(alone, shared), first)
    assert limit is not None and limit >= first
    gives = alone / (alone + shared * (limit - 1)) ** 2
    assert limit == first or gives >= 0.5 / (alone + shared * first) * (1 - 1e-6)


def test_one_number_of_ranks_is_not_enough():
    with pytest.raises(UsageError, match='of these "2 copies" has 2, "2 copies" has 2: give others'):
        scale([copies(2), copies(2)])
    with pytest.raises(UsageError, match="there is none"):
        scale([])


def test_runs_that_say_too_little_are_refused():
    silent = copies(2, step_values=lambda rank, step: {"samples": 0})
    with pytest.raises(UsageError, match='"2 copies" does not say how many samples'):
        scale([copies(1), silent])
    for run in (Run("made", Timeline()), Recorded(steps=1).run()):
        with pytest.raises(UsageError, match='the run "made" has no usual step.*record more'):
            scale([copies(1), Analysis(run)])
