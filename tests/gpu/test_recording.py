"""What a recording says of a GPU is what its own profiler says of its kernels."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.gpu import recorded
from tests.gpus import KEPT, VISIBLE
from tests.launching import run_ranks
from tests.parity.jobs import environment
from weft.profiler.reading import read_run
from weft.timeline import WORK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ[KEPT], reason="no GPU on this machine"),
]


def test_a_gpu_that_is_never_waited_for_has_its_own_times(tmp_path: Path):
    environ, config = {**environment(), VISIBLE: os.environ[KEPT]}, {"record": str(tmp_path / "recording")}
    arguments = ["1", str(tmp_path / "kernels")]
    run_ranks(1, recorded.__file__, arguments, environ, timeout=300, config=config).check()
    kernels_s = json.loads((tmp_path / "kernels0").read_text())["all_ms"] / 1e3
    run = read_run(tmp_path / "recording")
    last = recorded.STEPS - recorded.PROFILED
    spans = [span for span in run.timeline.spans if span.step > last]
    work_s = sum(span.duration_s for span in spans if span.kind in (*WORK, "optimizer"))
    assert 0.8 < work_s / kernels_s < 1.25, (work_s, kernels_s)
    steps = [step for step in run.steps[0] if step.step > last]
    assert len(steps) == recorded.PROFILED
    for step in steps:
        assert 0.8 < step.work_s / step.step_s < 1.001, "the device had nothing else to do"
