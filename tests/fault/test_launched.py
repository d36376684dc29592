"""Faults of ranks under `weft run`, without any framework: who is blamed, how fast, and what is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launching import SOURCE, Completed, processes_left, run_ranks, started
from tests.long import long, one_day_in, one_in

JOB = Path(__file__).parent / "workers" / "job.py"
PLACE = r"step 3, microbatch 1, forward of layers\.1"


def run(fault: str, rank: int = 1, *args: str, ranks: int = 2) -> Completed:
    return run_ranks(ranks, JOB, ["--fault", fault, "--rank", str(rank), *args], timeout=60)


def first_line(done: Completed) -> str:
    return done.stderr.splitlines()[0] if done.stderr else ""


def test_a_job_without_fault_ends_well():
    done = run("none").check()
    assert done.stderr == ""
    assert "rank 0 done" in done.stdout and "[rank 1] rank 1 done" in done.stdout


@pytest.mark.parametrize("rank", one_in(2, [0, 1]))
def test_an_exception_is_told_first_with_its_place_and_traceback(rank: int):
    done = run("exception", rank)
    assert done.returncode == 1
    assert re.match(
        rf"weft: rank {rank} on \S+ \(pid \d+\) failed in {PLACE}: ValueError: injected", first_line(done)
    )
    assert "KeyError: 'inner'" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("ValueError: injected")
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "rank", "code", "text"),
    one_in(
        3,
        [
            ("sigkill", 0, 137, rf"rank 0 on \S+ \(pid \d+\) was killed by SIGKILL in {PLACE}"),
            ("sigkill", 1, 137, rf"rank 1 on \S+ \(pid \d+\) was killed by SIGKILL in {PLACE}"),
            ("sigsegv", 1, 139, rf"rank 1 on \S+ \(pid \d+\) was killed by SIGSEGV in {PLACE}"),
            ("exit3", 1, 3, rf"rank 1 on \S+ \(pid \d+\) ended with exit code 3 in {PLACE}"),
            ("vanish", 1, 1, r"rank 1 on \S+ \(pid \d+\) left at step 3 while rank 0 still needs it"),
            ("leave", 1, 1, r"rank 1 on \S+ \(pid \d+\) left at step 3 while rank 0 still needs it: step 4"),
            ("leave", 0, 1, r"rank 0 on \S+ \(pid \d+\) left at step 3 while rank 1 still needs it: step \d"),
            ("sys.exit3", 1, 3, r"rank 1 on \S+ \(pid \d+\) left at step 3 while rank 0 still needs it"),
            (
                "stop",
                1,
                1,
                rf"rank 1 on \S+ \(pid \d+\) is frozen: no heartbeat for \d+\.\d s; last seen in {PLACE}",
            ),
            (
                "gil",
                0,
                1,
                rf"rank 0 on \S+ \(pid \d+\) is frozen: no heartbeat for \d+\.\d s; last seen in {PLACE}",
            ),
            ("sleep", 1, 1, rf"no rank gets on: rank 1 on \S+ \(pid \d+\) in {PLACE} for \d+\.\d s"),
        ],
    ),
)
def test_the_culprit_is_named_first(fault: str, rank: int, code: int, text: str):
    done = run(fault, rank, "--stall", "6" if fault == "sleep" else "60")
    assert re.match(f"weft: {text}", first_line(done)), done.stderr
    assert done.returncode == code


@one_day_in(2)
def test_three_ranks_all_end():
    done = run("sigkill", 2, ranks=3)
    assert "rank 2" in first_line(done)
    assert done.returncode == 137


@one_day_in(2)
def test_a_frozen_rank_shows_where_its_peers_are():
    done = run("gil", 1)
    assert "hold_interpreter" in done.stderr, "the stack of the rank that holds its interpreter"
    assert "in exchange" in done.stderr, "the stack of the rank that waits for it"


@long
def test_a_rank_that_is_stopped_for_less_than_the_timeout_survives():
    assert run("pause").check().stderr == ""


def test_a_rank_that_fails_before_it_is_watched_ends_the_job():
    done = run("exit3", 1, "--step", "-1")
    assert done.returncode == 3
    assert re.match(r"weft: rank 1 on \S+ \(pid \d+\) ended with exit code 3$", first_line(done))
    done = run_ranks(
        2, "import os\nif os.environ['RANK'] == '1':\n    import nowhere\nimport time\ntime.sleep(60)"
    )
    assert done.returncode == 1
    assert first_line(done).startswith("weft: rank 1 on")
    assert first_line(done).endswith("ModuleNotFoundError: No module named 'nowhere'")


def test_a_rank_that_ignores_the_polite_signal_is_killed():
    done = run("exit3", 1, "--deaf")
    assert done.returncode == 3


def test_children_of_ranks_end_with_them():
    with started(2, JOB, ["--fault", "exit3", "--child"]) as job:
        assert job.wait(60).returncode == 3
        assert processes_left(job.mark) == []


CHILDREN = {
    "a child": "subprocess.Popen(SLEEP)",
    "a child in a session of its own": "subprocess.Popen(SLEEP, start_new_session=True)",
    "a child without variables": "subprocess.Popen(SLEEP, env={})",
    "a daemon": "subprocess.Popen(['sh', '-c', 'setsid sleep 100 &'])",
    "a child that was forked": "os.fork() or time.sleep(100)",
}


@pytest.mark.parametrize("child", one_in(6, CHILDREN))
def test_children_of_ranks_end_with_a_killed_launcher(child: str, tmp_path: Path):
    seen = tmp_path / "seen"
    script = f"""
import os, subprocess, sys, time
SLEEP = ["sleep", "100"]
{CHILDREN[child]}
open({str(seen)!r} + str(os.getpid()), "w").close()
time.sleep(100)
"""
    with started(2, script) as job:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < (4 if "forked" in child else 2) and time.monotonic() < deadline:
            time.sleep(0.02)
        groups = set(job.ranks().values())
        job.process.send_signal(signal.SIGKILL)
        assert processes_left(job.mark) == []
        deadline = time.monotonic() + 30
        while (left := members_of(groups)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


def members_of(groups: set[int]) -> set[int]:
    """The living processes of some process groups."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) in groups and state not in "ZX":
                found.add(int(stat.parent.name))
    return found


UNWATCHED = {
    "before init": ("STOP\nimport weft.torch as weft\nweft.init()", "its start, before weft.init"),
    "after shutdown": (
        "import weft.torch as weft\nweft.init({'partitions': 2})\nweft.shutdown()\nSTOP",
        "its end, after weft.shutdown",
    ),
    "in atexit, before weft's own": (
        "import atexit\nimport weft.torch as weft\nweft.init()\n@atexit.register\ndef last():\n    STOP",
        "",
    ),
    "in atexit, after weft's own": (
        "import atexit\n@atexit.register\ndef last():\n    STOP\nimport weft.torch as weft\nweft.init()",
        "its end, after weft.shutdown",
    ),
}


@pytest.mark.parametrize("when", one_in(8, UNWATCHED))
def test_a_rank_that_stands_still_while_weft_does_not_watch_it_is_frozen(when: str):
    text, where = UNWATCHED[when]
    stop = "exec(\"if os.environ['RANK'] == '1':\\n os.kill(os.getpid(), signal.SIGSTOP)\")"
    script = f"import os, signal\n{text.replace('STOP', stop)}\n"
    done = run_ranks(2, script, timeout=60, options=["--timeout-heartbeat", "3"], warm=True)
    assert done.returncode == 1
    seen = f"; last seen in {where}" if where else ""
    told = rf"weft: rank 1 on \S+ \(pid \d+\) is frozen: no heartbeat for \d+\.\d s{seen}$"
    assert re.match(told, first_line(done)), done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_no_rank_outlives_the_launcher(number: int, code: int, tmp_path: Path):
    with started(2, JOB, ["--steps", "10000"], env={"TMPDIR": str(tmp_path)}) as job:
        job.wait_for_line("step 2")
        ranks = job.ranks()
        assert sorted(ranks) == [0, 1]
        job.process.send_signal(number)
        assert processes_left(job.mark, seconds=20) == []
        assert job.process.wait(20) == code
        assert list(tmp_path.iterdir()) == []


def test_a_second_interrupt_kills_at_once(tmp_path: Path):
    patient = "import weft.launch.local\nweft.launch.local.STOP_GRACE_SECONDS = 3600.0\n"
    (tmp_path / "sitecustomize.py").write_text(patient)
    path = os.pathsep.join([str(tmp_path), str(SOURCE)])
    with started(2, JOB, ["--steps", "10000", "--deaf"], env={"PYTHONPATH": path}) as job:
        job.wait_for_line("step 2")
        job.process.send_signal(signal.SIGINT)
        assert job.process.stderr is not None
        assert "SIGINT: ending 2 ranks" in job.process.stderr.readline()
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(60) == 130


def test_a_failed_job_leaves_nothing_behind(tmp_path: Path):
    shared = set(os.listdir("/dev/shm"))
    with started(2, JOB, ["--fault", "sigkill"], env={"TMPDIR": str(tmp_path)}) as job:
        assert job.wait(60).returncode == 137
        assert processes_left(job.mark) == []
    assert list(tmp_path.iterdir()) == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "weft" in name} == set()


def test_lines_of_ranks_are_never_mixed():
    script = """
import os, sys
rank = os.environ["RANK"]
for number in range(300):
    sys.stdout.write(rank * 40)
    sys.stdout.flush()
    sys.stdout.write(rank * 40 + "\\n")
"""
    done = run_ranks(3, script).check()
    lines = done.stdout.splitlines()
    whole = {"0" * 80, f"[rank 1] {'1' * 80}", f"[rank 2] {'2' * 80}"}
    closed_early = {line for line in lines if set(line) == {"0"} and len(line) in (40, 80)}
    assert {line for line in lines if line} <= whole | closed_early
    assert "".join(line for line in lines if line.startswith("0")).count("0") == 300 * 80


def test_the_report_survives_a_reader_that_went_away():
    with started(2, JOB, ["--steps", "10000"]) as job:
        job.wait_for_line("step 2")
        assert job.process.stdout is not None
        job.process.stdout.close()
        assert job.process.wait(15) == 128 + signal.SIGPIPE
        assert processes_left(job.mark) == []
        job.process.stdout = None
