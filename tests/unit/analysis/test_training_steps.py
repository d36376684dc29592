"""Which recorded steps count as training steps."""

from __future__ import annotations

from dataclasses import replace

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.timeline import Span, Timeline


def test_what_lies_before_the_first_step_is_no_step():
    run = Recorded(partitions=2, steps=4).run()
    before = Timeline([Span(0, "collector", -1, -1.0, -0.5, step=0)])
    assert Analysis(replace(run, timeline=run.timeline.merged(before))).training_steps == {2, 3, 4}
