"""Jobs with a folder of their own: seen, followed and ended from another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.launching import SOURCE, processes_left, started
from weft.launch.journal.job_status import read, stop

RESTARTING = Path(__file__).parent / "workers" / "restarting.py"
WAITING = "import time\nimport weft.torch as weft\nweft.init()\nprint('here', flush=True)\ntime.sleep(1000)\n"


def test_a_job_is_followed_over_a_restart_and_told_to_save(tmp_path: Path):
    folder = tmp_path / "runs"
    given = [str(tmp_path), "100000", "--pause", "0.05", "--faults", "[[1, 3]]"]
    options = ["--max-restarts", "2", "--log-dir", str(folder), "-x", "API_KEY=hidden-value"]
    with started(2, RESTARTING, given, options=options, warm=True) as job:
        deadline = time.monotonic() + 90
        while not (tmp_path / "losses-1").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert read(folder).pid == job.process.pid
        follow = [
            sys.executable,
            "-m",
            "weft",
            "logs",
            str(folder),
            "--rank",
            "1",
            "--attempt",
            "0",
            "--follow",
        ]
        environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
        log = subprocess.run(
            follow, env=environ, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert "weft: rank 1 on " in log and "was killed by SIGKILL" in log
        assert stop(folder, 90).code == 75
        done = job.wait(60)
        assert processes_left(job.mark) == []
    assert done.returncode == 75, done.stderr
    events = [event["event"] for event in read(folder).events]
    first = events[: events.index("restart")]
    assert first[:3] == ["attempt", "started", "rank ended"]
    # the other rank is ended while the failure is written
    assert sorted(first[3:]) in (["failed"], ["failed", "rank ended"])
    assert "saving" in events and events[-1] == "ended"
    failure = read(folder).failure
    assert failure is not None
    assert (failure["rank"], failure["attempt"], failure["code"]) == (1, 0, 128 + signal.SIGKILL)
    assert not [path for path in folder.rglob("*") if path.is_file() and b"hidden-value" in path.read_bytes()]
    assert sorted(path.name for path in folder.glob("attempt-*")) == ["attempt-0", "attempt-1"]


def test_stacks_of_those_that_answer_are_kept(tmp_path: Path):
    options = ["--log-dir", str(tmp_path), "--timeout-heartbeat", "2", "--prefix", "none"]
    with started(2, WAITING, options=options, warm=True) as job:
        deadline = time.monotonic() + 60
        while "here" not in _log(tmp_path, 1) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(read(tmp_path).events[1]["ranks"]["1"]["pid"], signal.SIGSTOP)
        done = job.wait(60)
        assert processes_left(job.mark) == []
    assert done.returncode == 1
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["rank"], failure["kind"]) == (1, "frozen")
    assert "script.py" in failure["stacks"]["0"] and "1" not in failure["stacks"]


def _log(folder: Path, rank: int) -> str:
    path = folder / "attempt-0" / f"rank-{rank}.log"
    return path.read_text() if path.exists() else ""
