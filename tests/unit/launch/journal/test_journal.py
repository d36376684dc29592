"""The folder of a job: what is written there, and what of it is believed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.errors import FormatError, LaunchError
from weft.launch.journal import job_status
from weft.launch.journal.job_status import read, stop
from weft.launch.journal.journal import Journal
from weft.watch.process import began, boot

RUN = {"engine": "local", "script": "train.py", "ranks": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


@pytest.fixture
def journal(folder: Path) -> Iterator[Journal]:
    found = Journal(folder, RUN)
    yield found
    found.close()


def test_each_start_and_rank_has_a_log_of_its_own(folder: Path):
    for start in range(2):
        journal = Journal(folder, RUN)
        for attempt in range(2):
            journal.begin(attempt, 2)
            journal.take(1, f"start {start}, attempt {attempt}\n".encode())
        journal.note("ended", code=0)
        journal.close()
    logs = sorted(path.relative_to(folder) for path in folder.glob("*/*"))
    assert [str(path) for path in logs] == [
        f"attempt-{n}/rank-{rank}.log" for n in range(4) for rank in range(2)
    ]
    assert (folder / "attempt-3" / "rank-1.log").read_text() == "start 1, attempt 1\n"
    assert (folder / "attempt-3" / "rank-0.log").read_text() == ""
    told = read(folder)
    assert (told.pid, told.code) == (0, 0)
    assert [event["attempt"] for event in told.events if event["event"] == "attempt"] == [
        0,
        1,
    ]  # of the second start
    assert len((folder / "events.jsonl").read_text().splitlines()) == 6


def test_a_running_job_is_found_and_keeps_others_out(journal: Journal, folder: Path):
    journal.begin(0, 2)
    journal.note("started", ranks={"0": {"pid": 7, "host": "node7"}, "1": {"pid": 8, "host": "node7"}})
    journal.note("rank ended", rank=1, code=-9)
    told = read(folder)
    assert told.pid == os.getpid() and told.code is None
    lines = [*told.lines()]
    assert lines[0].endswith(f"runs, launcher pid {os.getpid()}")
    assert lines[-2:] == ["  rank 0: runs, pid 7 on node7", "  rank 1: ended, exit code -9, pid 8 on node7"]
    with pytest.raises(
        LaunchError, match="a job runs with the folder .*: name another one for this job, or end that"
    ):
        Journal(folder, RUN)


def test_a_failure_of_an_earlier_start_goes(folder: Path):
    journal = Journal(folder, RUN)
    journal.begin(0, 2)
    journal.fail({"rank": 1, "headline": "rank 1 failed"})
    journal.close()
    assert read(folder).failure == {**read(folder).failure, "rank": 1, "attempt": 0}
    assert "attempt 0: failed after " in "\n".join(read(folder).lines())
    Journal(folder, RUN).close()
    assert read(folder).failure is None


def test_a_launcher_that_told_nothing(journal: Journal, folder: Path):
    journal.close()
    journal._events = os.open(os.devnull, os.O_WRONLY)
    assert "its launcher is gone and left no exit code" in next(read(folder).lines())


@pytest.mark.parametrize("change", [{}, {"began": 1}, {"boot": "another"}, {"pid": 1}, {"pid": "7"}])
def test_only_the_launcher_of_this_folder_is_signalled(folder: Path, change: dict[str, object]):
    """Another process of this user, with the right time of its start, is not it: it has not the events open."""
    Journal(folder, RUN).close()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        launcher = {"pid": other.pid, "began": began(other.pid), "boot": boot(), "host": read(folder).host}
        (folder / "run.json").write_text(json.dumps({**RUN, "time": 1.0, "launcher": {**launcher, **change}}))
        assert read(folder).pid == 0
        with pytest.raises(LaunchError, match=r'no job runs with ".*runs/a": there is nothing to end'):
            stop(folder)
        assert other.poll() is None
        other.communicate(b"\n", timeout=60)
    assert other.returncode == 0


def test_a_launcher_that_does_not_listen_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_status, "END_S", 1.0)
    deaf = (
        "import pathlib, signal, sys, time\nfrom weft.launch.journal.journal import Journal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\njournal = Journal(pathlib.Path(sys.argv[1]), {})\n"
        "print('here', flush=True)\ntime.sleep(1000)\n"
    )
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", deaf, str(folder)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"here\n"
        assert stop(folder, 0, said.append).code is None
        assert launcher.wait(60) == -signal.SIGKILL
    assert [text.rpartition(" (")[0].rpartition(" is ")[2] for text in said] == [
        "asked to end", "asked to end at once", "killed"
    ]  # fmt: skip


def test_a_job_of_another_host(folder: Path):
    Journal(folder, RUN).close()
    (folder / "run.json").write_text(json.dumps({**RUN, "launcher": {"pid": 9, "host": "node\x1b[2J7"}}))
    assert r"started on node\x1b[2J7; whether it runs can be seen there" in next(read(folder).lines())
    with pytest.raises(LaunchError, match="was started on node.*7: run weft stop there"):
        stop(folder)


def test_links_and_pipes_are_not_followed(folder: Path, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    folder.mkdir(parents=True)
    (folder / "events.jsonl").symlink_to(secret)
    with pytest.raises(LaunchError, match="--log-dir .* cannot be written to"):
        Journal(folder, RUN)
    (folder / "events.jsonl").unlink()
    Journal(folder, RUN).close()
    (folder / "attempt-0").mkdir()
    (folder / "attempt-0" / "rank-0.log").symlink_to(secret)
    assert main(["logs", str(folder)]) == 2
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    with pytest.raises(FormatError, match="it is no regular file"):
        read(folder)
    assert secret.read_text() == "secret\n"


def test_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]):
    journal = Journal(folder, RUN)
    journal.begin(0, 1)
    journal.close()
    with (folder / "events.jsonl").open("a") as file:
        file.write('[1, 2]\n"x"\n{"time": "late", "event": 3}\n{"time": 1')
    assert [event["event"] for event in read(folder).events] == ["attempt", 3]
    assert [*read(folder).lines()]
    (folder / "run.json").write_text("[" * 5000)
    assert main(["status", str(folder)]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_a_full_disk_is_told_once(journal: Journal, folder: Path):
    journal.begin(0, 1)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._logs[0])
    os.close(full)
    journal.take(0, b"a line\n")
    assert journal.lost == "No space left on device"


def test_logs(folder: Path, capsysbinary: pytest.CaptureFixture[bytes]):
    journal = Journal(folder, RUN)
    assert main(["logs", str(folder)]) == 2
    journal.begin(0, 2)
    journal.take(1, b"one \xff\n")
    journal.begin(1, 2)
    journal.take(1, b"two\n")
    assert main(["logs", str(folder), "--rank", "1"]) == 0
    assert main(["logs", str(folder), "--rank", "1", "--attempt", "0"]) == 0
    journal.close()
    assert main(["logs", str(folder), "--rank", "1", "--follow"]) == 0
    assert capsysbinary.readouterr().out == b"two\none \xff\ntwo\n"
    assert main(["logs", str(folder), "--rank", "2"]) == 2
    assert main(["logs", str(folder), "--attempt", "5"]) == 2
    told = capsysbinary.readouterr().err.decode()
    assert "the job has no such rank" in told and "has no attempt-5: there are 0 to 1" in told


def test_no_folder_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for command in ("status", "logs", "stop"):
        assert main([command, str(tmp_path)]) == 2
        assert "is no folder of a job: name one that weft run --log-dir was given" in capsys.readouterr().err
