"""A replica that is killed: the others go on without its samples, and it joins them again with their state."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.fault import rejoin
from tests.fault.rejoin import LAYOUTS, check, options, ranks
from tests.launching import ROOT, SOURCE, Completed, run_ranks, started
from tests.long import one_day_in, one_in
from weft.checkpoint.find import in_order
from weft.reduce.members import available

pytestmark = pytest.mark.skipif(not available(), reason="replicas share memory on Linux on x86-64")
JOB = rejoin.JOB
MOMENTS = ("step", "POSTED", "after POSTED", "SUMMED", "after SUMMED", "ARRIVED", "after ARRIVED")


def train(
    folder: Path,
    layout: str,
    steps: int,
    faults: list[list[object]],
    sleep_s: float = 0.1,
    more: tuple[str, ...] = (),
) -> Completed:
    """A job that ends by itself."""
    given = [str(folder), str(steps), json.dumps(faults), str(sleep_s)]
    return run_ranks(ranks(layout), JOB, given, options=[*options(layout, restarts=4), *more], timeout=240)


@pytest.mark.parametrize(
    ("layout", "moment"), one_in(21, [(layout, moment) for layout in LAYOUTS for moment in MOMENTS])
)
def test_the_others_leave_its_samples_out(tmp_path: Path, layout: str, moment: str):
    """The last rank, and with more than two replicas another one: both come back."""
    last = ranks(layout) - 1
    faults = [[last, 0, moment, 4], *([[0, 0, moment, 6]] if layout == "1x4" else [])]
    done = train(tmp_path, layout, 150, faults).check()
    replicas = [rank // LAYOUTS[layout][0] for rank, *_ in faults]
    for replica in replicas:
        assert f"weft: replica {replica} is lost, " in done.stderr, done.stderr
        assert f"weft: replica {replica} has joined: " in done.stderr, done.stderr
    assert done.stderr.count("was killed by SIGKILL") == len(faults)
    check(tmp_path, layout)
    written = rejoin.rows(tmp_path)
    assert {mine[-1]["step"] for mine in written.values()} == {150}
    assert len(written[last]) < 150


@pytest.mark.parametrize("moment", one_in(4, ["READY", "after POSTED", "TAKEN", "after TAKEN"]))
def test_it_may_be_killed_as_it_joins(tmp_path: Path, moment: str):
    done = train(tmp_path, "1x2", 250, [[1, 0, "step", 3], [1, 1, moment, None]]).check()
    assert "weft: replica 1 has joined: 2 of 2" in done.stderr
    assert "it is started again in 1 s (2 of 4)" in done.stderr
    check(tmp_path, "1x2")


@one_day_in(3)
def test_a_job_ends_with_too_few_replicas(tmp_path: Path):
    """It begins again from the save that a lost replica has left."""
    faults = [[0, 0, "step", 15], [1, 0, "step", 17]]
    done = train(tmp_path, "1x2", 20, faults, sleep_s=0.0).check()
    assert "weft: 0 of 2 replicas are left, fewer than min_replicas 1" in done.stderr
    assert "weft: restart 1 of 4 in 1 s" in done.stderr
    check(tmp_path, "1x2")


def test_all_save_after_the_same_step(tmp_path: Path):
    given = [str(tmp_path), "100000", "[]", "0.01"]
    with started(2, JOB, given, options=options("1x2")) as job:
        deadline = time.monotonic() + 100
        while len(rejoin.rows(tmp_path)) < 2 or not all(rejoin.rows(tmp_path).values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(job.process.pid, signal.SIGTERM)
        done = job.wait(60)
    assert done.returncode == os.EX_TEMPFAIL, done.stderr
    last = {mine[-1]["step"] for mine in rejoin.rows(tmp_path).values()}
    assert len(last) == 1
    assert in_order(tmp_path / "saves", None)[0].tag == f"step{last.pop()}"


@one_day_in(3)
def test_a_replica_that_the_others_wait_for_is_ended(tmp_path: Path):
    """It sleeps in its third step."""
    code = f"""
import os, sys, time
sys.argv = ["rejoining.py", {str(tmp_path)!r}, "200", "[]", "0.05"]
from tests.fault.workers import rejoining
from weft.checkpoint.loop import Loop
begin = Loop._begin_step
def slow(self):
    begin(self)
    if self.step == 3 and os.environ["WEFT_REPLICA"].split(":")[2:4] == ["1", "0"]:
        time.sleep(1000)
Loop._begin_step = slow
from pathlib import Path
rejoining.main(Path(sys.argv[1]), 200, [], 0.05)
"""
    given = {"PYTHONPATH": os.pathsep.join(map(str, (SOURCE, ROOT)))}
    more = [*options("1x2"), "--timeout-wait", "4"]
    done = run_ranks(2, code, env=given, options=more, timeout=120).check()
    assert "weft: replica 1 has not come to the end of a step in 4 s, and others wait for it" in done.stderr
    assert "weft: replica 1 has joined: 2 of 2" in done.stderr
    check(tmp_path, "1x2")


SCRIPT = """
import torch
import weft.torch as weft
weft.init({settings})
model = weft.DistributedModel(torch.nn.Linear(2, 2))
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
step = weft.step(lambda model, x: model.backward(model(x).sum()))
{more}
"""


def test_what_cannot_be_is_refused():
    """Before ranks are started, or in the first step."""

    def refused(n: int, settings: str = "", more: str = "", least: int = 1) -> str:
        script = SCRIPT.format(settings=settings, more=more)
        return run_ranks(
            n, script, options=["--quiet", *(["--min-replicas", str(least)] if least else [])]
        ).stderr

    assert "min_replicas is 2, and 2 ranks make 2 replicas: write a smaller number" in refused(2, least=2)
    assert "weft run --min-replicas 1 --partitions 1" in refused(1, "min_replicas=1", least=0)
    assert "give it to weft run as well, --partitions 2" in refused(2, "partitions=2")
    assert "steps in a loop of weft.checkpoints" in refused(2, more="step(model, torch.ones(2, 2))")
    outside = refused(2, more="model(torch.ones(2, 2))")
    assert (
        "a call of the model outside of a weft.step, whose gradients are averaged, needs all replicas"
        in outside
    )
    assert "WORLD needs all replicas, and with min_replicas some may be lost" in refused(
        2, more="weft.barrier()"
    )
