"""Streams, signals and surroundings as daemons, shells and cluster software hand them to a launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.launching import FOREIGN, SOURCE, Running, processes_left, started
from tests.long import long, one_day_in, one_in

WEFT = f"{sys.executable} -m weft"
PAIR = """
import os, sys
import weft.torch as weft
weft.init({"partitions": 1})
found = weft.allgather(weft.rank())
sys.stdout.write(f"\\u2713 {found} {sys.stdin.read() if sys.stdin else None!r}\\n")
"""
SPAM = "while True:\n    print('x' * 200)"
TICK = "import time\nfor number in range(400):\n    print('tick', number, flush=True)\n    time.sleep(0.05)"


def shell(
    command: str, env: Mapping[str, str] | None = None, seconds: float = 90, unset: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a shell's command; `weft` in it is the command under test."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    environ = {
        **kept,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **(env or {}),
    }
    for name in unset:
        environ.pop(name, None)
    return subprocess.run(
        ["bash", "-c", f"weft() {{ {WEFT} \"$@\"; }}; {command}"],
        env=environ, capture_output=True, encoding="utf-8", timeout=seconds, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@long
def test_without_standard_input_every_rank_finds_its_job(script):
    done = shell(f"weft run -n 2 {script(PAIR)} <&-")
    assert done.returncode == 0, done.stderr
    assert "✓ [0, 1] ''" in done.stdout and "[rank 1] ✓ [0, 1] ''" in done.stdout


@pytest.mark.parametrize("closed", one_in(3, [">&-", "2>&-", ">&- 2>&- <&-"]))
def test_without_standard_output_or_error_a_job_ends_well(script, closed: str):
    done = shell(f"weft run -n 2 {script('import os')} {closed}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_full_disk_is_told_once_and_the_job_goes_on(script, tmp_path: Path):
    end = tmp_path / "end"
    text = f"for _ in range(9):\n    print('x', flush=True)\nopen({str(end)!r}, 'w').close()"
    done = shell(f"weft run -n 1 {script(text)} >/dev/full")
    assert done.returncode == os.EX_IOERR and end.exists()
    told = "the standard output cannot be written to: No space left on device. What is written there is lost"
    assert done.stderr == f"weft: {told}\n"


def _wait_for_ranks(job: Running) -> None:
    """Until the launcher has started its ranks: it takes signals from before that on."""
    deadline = time.monotonic() + 100
    while not job.ranks():
        assert time.monotonic() < deadline and job.process.poll() is None
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_launcher_whose_reader_stalls_can_be_ended(script, number: int, code: int):
    with started(1, script(SPAM)) as job:
        _wait_for_ranks(job)
        time.sleep(2.0)  # nobody reads: the pipe, and what the launcher keeps, are full by then
        job.process.send_signal(number)
        assert job.process.wait(20) == code
        assert processes_left(job.mark) == []


def test_ranks_that_wait_for_a_reader_are_not_to_blame(script):
    with started(2, script(SPAM), options=["--timeout-heartbeat", "1", "--timeout-wait", "1"]) as job:
        _wait_for_ranks(job)
        time.sleep(4.0)
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(20) == 143


@pytest.mark.parametrize("name", one_in(3, ["HUP", "INT", "TERM"]))
def test_a_signal_that_is_ignored_stays_ignored(script, name: str):
    """As under nohup, or for what a script's shell starts with `&`."""
    start = f"trap '' {name}; {WEFT} run -n 1 {script(TICK)} &"
    done = shell(f"{start} sleep 2; kill -{name} $!; sleep 1; kill -0 $! && echo lives; kill -KILL $!; wait")
    assert "lives" in done.stdout and f"SIG{name}" not in done.stderr


@long
def test_unusual_surroundings(script):
    """All of them at once: a job costs seconds."""
    path = script(PAIR)
    environ = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii:backslashreplace", "PYTHONUTF8": "0"}
    done = shell(
        f"umask 077; setsid -w {WEFT} run -n 2 {path} | cat",
        environ,
        unset=["HOME", "USER", "LOGNAME", "TERM"],
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "\\u2713 [0, 1] ''" in done.stdout


@one_day_in(2)
def test_a_folder_and_a_home_that_cannot_be_written_to(script, tmp_path: Path):
    """Nothing of weft's own is written there: the files are read-only for everybody, root included."""
    if os.getuid() or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    path = script(PAIR)
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    small = "mount -t tmpfs -o size=64k none /dev/shm"
    done = shell(
        f"unshare -m bash -c '{mount} && {small} && cd {tmp_path} && HOME={tmp_path} {WEFT} run -n 2 {path}'"
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mounts here")
    assert done.returncode == 0, done.stderr
    assert "✓ [0, 1] ''" in done.stdout
