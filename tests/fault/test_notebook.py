"""A function that was typed into Python runs on several ranks, its output appears at once, and an interrupt ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.launching import MARK, _environ, end_all, processes_left
from tests.long import long
from weft.errors import LaunchError, UsageError
from weft.launch.running import notebook
from weft.launch.running.notebook import notebook_run

pytest.importorskip("cloudpickle", reason="cloudpickle is not installed: pip install 'weft[notebook]'")
SESSION = """
import os, sys, time
from weft.launch.running.notebook import notebook_run
width = 3

def train(scale):
    import torch
    import weft.torch as weft

    weft.init()
    print("rank", weft.rank(), "partitions", weft.pp_size(), flush=True)
    told = weft.allgather(width * scale * (weft.rank() + 1))
    return {"told": told, "tensor": torch.ones(2) * scale}

print(notebook_run(train, 2, ranks=2, settings={"partitions": 2}))
try:
    notebook_run(lambda: 1 / 0, ranks=2)
except Exception as error:
    print("caught", type(error).__name__, error)

def wait():
    print("waiting", flush=True)
    time.sleep(600)

try:
    notebook_run(wait)
except KeyboardInterrupt:
    print("interrupted")

print("goes on")
"""


@long
def test_functions_that_were_typed_in_run_on_ranks(tmp_path: Path):
    """As in a notebook: what was typed has no file, and the process goes on after a failure and an interrupt."""
    mark = os.urandom(8).hex()
    process = subprocess.Popen(
        [sys.executable, "-i", "-q", "-u"], env=_environ({MARK: mark, "TMPDIR": str(tmp_path)}), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    seen: list[str] = []
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    with process:
        try:
            process.stdin.write(f"exec({SESSION!r})\n")
            process.stdin.flush()
            for line in process.stdout:
                seen.append(line.strip())
                if "waiting" in line and sum("waiting" in each for each in seen) == 2:
                    process.send_signal(signal.SIGINT)
                if "goes on" in line:
                    break
            process.stdin.close()
            assert process.wait(60) == 0
            reader.join(30)
            assert processes_left(mark) == []
        finally:
            end_all(mark)
            process.kill()
    text = "\n".join(seen)
    assert "rank 0 partitions 2" in text and "[rank 1] rank 1 partitions 2" in text
    assert "{'told': [6, 12], 'tensor': tensor([2., 2.])}" in text, text + errors[0]
    assert "caught LaunchError the job ended with exit code 1: rank " in text
    assert "ZeroDivisionError: division by zero" in text
    assert text.endswith("interrupted\ngoes on"), text + errors[0]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notebook, "_followed", lambda command: pytest.fail("started"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    lock = threading.Lock()
    with pytest.raises(UsageError, match="hold cannot be copied to another process: .*lock.*; make inside"):

        def hold() -> bool:
            return lock.locked()

        notebook_run(hold)
    with pytest.raises(UsageError, match="ranks is 0: write a whole number"):
        notebook_run(time.time, ranks=0)
    with pytest.raises(UsageError, match="was given 3: give it a function, without calling it"):
        notebook_run(3)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "cloudpickle", None)
        with pytest.raises(UsageError, match=r"pip install 'weft\[notebook\]'"):
            notebook_run(time.time)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=r"this process is a rank of a job \(RANK is set\)"):
        notebook_run(time.time)


def test_ranks_that_leave_early_return_nothing(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(LaunchError, match="no rank returned anything"):
        notebook_run(lambda: sys.exit(0), ranks=1)
