"""What several rules measure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recordings import Recorded
from tests.unit.rules.cases import with_gaps
from weft.analysis.analysis import Analysis
from weft.rules.measures import core_time

HALF = Recorded(partitions=2, replicas=2, reduce_s=40.0, step_values=lambda rank, step: {"cpu_s": 12.0})
"""24 seconds of work, 12 of them with a core; then a sum of gradients that is waited for."""


def test_waits_need_no_core():
    analysis = Analysis(HALF.run())
    assert [core_time(analysis, rank) for rank in analysis.ranks] == pytest.approx([0.5] * 4)


def test_python_between_passes_needs_the_core_as_well():
    """Half of the work is Python now: with 12 seconds the passes alone would have had their core all the time."""
    assert core_time(Analysis(with_gaps(HALF.run(), 0.5)), 0) == pytest.approx(0.5)


@pytest.mark.parametrize("other", [{"device": "cuda:0"}, {"versions": {"TensorFlow": "2.20"}}])
def test_the_time_of_all_threads_says_nothing_of_the_one_that_trains(other: dict[str, object]):
    run = HALF.run()
    run = replace(run, facts={rank: replace(each, **other) for rank, each in run.facts.items()})  # type: ignore[arg-type]
    assert core_time(Analysis(run), 0) is None
