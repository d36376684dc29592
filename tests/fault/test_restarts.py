"""Jobs that are killed and start again by themselves go on as if nothing had been, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.fault.restarts_battery import Battery, losses, undisturbed
from tests.launching import Completed, processes_left, run_ranks, started
from tests.long import long, one_day_in, one_in
from weft.checkpoint.find import in_order

JOB = Path(__file__).parent / "workers" / "restarting.py"
STEPS = 60
SEED = 7


def run(folder: Path, steps: int, *args: str, restarts: int = 0) -> Completed:
    folder.mkdir(exist_ok=True)
    options = ["--max-restarts", str(restarts)] if restarts else []
    return run_ranks(2, JOB, [str(folder), str(steps), *args], options=options, timeout=120, warm=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing had interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, STEPS).check()
    assert list(losses(folder)) == list(range(1, STEPS + 1))
    return folder


def check_like(folder: Path, whole: Path) -> None:
    """The run in a folder had the same losses, and has the same weights."""
    assert losses(folder) == losses(whole)
    assert (folder / "end").read_text() == (whole / "end").read_text()


@pytest.mark.parametrize(("kills", "more"), one_in(2, [(3, []), (2, ["--asynchronous"])]))
def test_kills_change_nothing(tmp_path: Path, whole: Path, kills: int, more: list[str]):
    draw = random.Random(SEED + kills)
    faults = [[draw.randrange(2), step] for step in sorted(draw.sample(range(1, STEPS + 1), kills))]
    done = run(tmp_path, STEPS, "--faults", json.dumps(faults), *more, restarts=3).check()
    check_like(tmp_path, whole)
    report = done.stderr[done.stderr.index(f"weft: {kills} of 3 restarts; exit code 0\n") :].splitlines()
    assert len(report) == kills + 2
    for number, (rank, step) in enumerate(faults):
        assert report[number + 1].startswith(f"  attempt {number}: step {step}, after "), report
        assert f": rank {rank} on " in report[number + 1] and "SIGKILL" in report[number + 1]
    assert report[-1].startswith(f"  attempt {kills}: after ") and report[-1].endswith(": ended")
    assert sum(name.name.endswith("_partial") for name in (tmp_path / "saves").iterdir()) == 2


@one_day_in(2)
def test_a_newest_save_that_was_cut_is_not_taken(tmp_path: Path, whole: Path):
    run(tmp_path, STEPS - 8).check()
    newest, before = in_order(tmp_path / "saves", None)
    assert (newest.tag, before.tag) == ("step52", "step50")
    shard = newest.folder / "rank-0001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    done = run(tmp_path, STEPS).check()
    assert "step52_partial/rank-0001.safetensors is truncated" in done.stderr
    check_like(tmp_path, whole)


@one_day_in(2)
def test_a_failure_that_comes_back_at_the_same_step_ends_the_job(tmp_path: Path):
    done = run(tmp_path, STEPS, "--faults", json.dumps([[1, 7]] * 9), restarts=8)
    assert done.returncode == 128 + signal.SIGKILL
    assert "weft: 2 of 8 restarts; no progress in 3 attempts, which all failed in step 7\n" in done.stderr
    assert sorted(file.name for file in tmp_path.glob("losses-*")) == ["losses-0", "losses-1", "losses-2"]


def test_a_run_that_had_ended_and_starts_again_has_its_weights(tmp_path: Path, whole: Path):
    for _ in range(2):  # the second time no step is left to do
        run(tmp_path, STEPS).check()
        check_like(tmp_path, whole)
        (tmp_path / "end").unlink()


def test_wrong_use_is_not_tried_again():
    done = run_ranks(1, "import sys\nsys.exit(2)", options=["--max-restarts", "5"], timeout=60, warm=True)
    assert done.returncode == 2 and "restart" not in done.stderr


@pytest.mark.parametrize("number", one_in(2, [signal.SIGUSR1, signal.SIGTERM]))
def test_a_job_that_is_told_to_end_saves_and_goes_on(tmp_path: Path, whole: Path, number: int):
    given = [str(tmp_path), "100000", "--pause", "0.05"]
    with started(2, JOB, given, options=["--max-restarts", "5"], warm=True) as job:
        deadline = time.monotonic() + 60
        while not (tmp_path / "losses-0").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(job.process.pid, number)
        done = job.wait(60)
        assert processes_left(job.mark) == []
    assert done.returncode == 75, done.stderr
    assert "the job saves after a step and ends; a second signal ends it at once" in done.stderr
    last = max(losses(tmp_path))
    assert in_order(tmp_path / "saves", None)[0].tag == f"step{last}"
    if last < STEPS:
        run(tmp_path, STEPS).check()
        check_like(tmp_path, whole)


@long
def test_failures_at_random_moments_change_nothing(tmp_path: Path):
    """A short form of `make restarts`."""
    steps = 120
    battery = Battery(random.Random(SEED), mean_s=2.0, steps=steps)
    assert battery.run(tmp_path, asynchronous=False) == undisturbed(steps)
    assert battery.restarts > 0
