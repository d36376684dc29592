"""Two runs side by side: what changed, on which rank, and what is set otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.compare import Comparison, Setting, compare
from weft.analysis.run import Run
from weft.errors import UsageError
from weft.timeline import Timeline


def compared(old: Recorded, new: Recorded) -> Comparison:
    return compare(Analysis(old.run("old")), Analysis(new.run("new")))


def test_a_rank_that_became_slower_is_the_cause_of_the_others_waits():
    found = compared(Recorded(), Recorded(backward_s=[2, 2, 3, 2]))
    assert found.change > 0
    assert (found.rank, found.cause and found.cause.part) == (2, "backward")
    assert found.cause is not None and found.cause.more_s == pytest.approx(8.0)
    assert "backward on rank 2: 24 s instead of 16 s" in found.text


def test_what_became_slower_on_all_ranks_is_on_none():
    found = compared(Recorded(2, 4), Recorded(2, 4, optimizer_s=6))
    assert (found.rank, found.cause and found.cause.part) == (None, "optimizer")
    assert "most of all by optimizer: 6 s instead of 0 ns" in found.text


def test_fewer_microbatches_leave_a_larger_bubble():
    found = compared(Recorded(4, 8, 1), Recorded(4, 2, 1, forward_s=4, backward_s=8))
    assert found.cause is not None and found.cause.part in ("warmup", "steady", "drain")
    assert found.settings == (Setting("microbatches", 8, 2),)
    assert "Set otherwise: microbatches 2 instead of 8." in found.text


def test_a_faster_run_says_what_it_saves():
    found = compared(Recorded(2, 4, data_s=10), Recorded(2, 4))
    assert (found.rank, found.cause and found.cause.part) == (0, "data")
    assert "40.0% less" in found.text
    assert found.samples_s == (pytest.approx(32 / 25), pytest.approx(32 / 15))


def test_equal_runs_have_no_cause():
    found = compared(Recorded(), Recorded())
    assert (found.cause, found.rank, found.settings) == (None, None, ())
    assert found.text == "A step takes as long as before: 33 s after 33 s."


def test_runs_on_other_numbers_of_ranks_compare_those_that_both_have():
    found = compared(Recorded(2, 4), Recorded(4, 4))
    assert set(found.ranks) == {0, 1}
    assert Setting("ranks", 2, 4) in found.settings


def test_a_run_without_steps_is_refused():
    for run in (Run("made", Timeline()), Recorded(steps=1).run()):
        with pytest.raises(UsageError, match='the run "made" has no usual step.*record more'):
            compare(Analysis(Recorded().run()), Analysis(run))


MADE = st.builds(
    Recorded,
    partitions=st.integers(1, 3), microbatches=st.integers(1, 4), replicas=st.integers(1, 2), steps=st.just(3),
    forward_s=st.floats(0.1, 3), data_s=st.floats(0, 2), reduce_s=st.floats(0, 2), transfer_s=st.floats(0, 1),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(MADE, MADE)
def test_the_differences_of_parts_add_up_to_that_of_the_step(old: Recorded, new: Recorded):
    found = compared(old, new)
    assert sum(each.more_s for each in found.parts) == pytest.approx(found.step.more_s, abs=1e-9)
    for rank, own in found.ranks.items():
        took = [Analysis(made.run()).typical[rank].total for made in (old, new)]
        assert sum(each.more_s for each in own) == pytest.approx(took[1] - took[0], abs=1e-9)
