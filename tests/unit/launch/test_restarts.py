"""When a job is started again, and what is told of it; no process is started here."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from weft.launch.running import restarts
from weft.launch.running.job import Failed, Host, Job
from weft.launch.running.restarts import backoff_s, in_a_row, reason_to_stop

KILLED = Failed("rank 1 was killed", "", 7, 0, 137)
RAISED = Failed("rank 0 failed: ValueError: no", "ValueError: no", None, 0, 1)
JOB = Job(["train.py"], 2, restarts=5)


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        ([KILLED], ""),
        ([KILLED] * 2, ""),
        ([KILLED] * 3, "no progress in 3 attempts, which all failed in step 7"),
        ([replace(KILLED, saves=1), KILLED, KILLED], "no progress in 3 attempts, which all failed in step 7"),
        ([KILLED, KILLED, replace(KILLED, saves=1)], ""),
        ([KILLED, replace(KILLED, step=8), KILLED], ""),
        ([replace(KILLED, step=0)] * 3, "no progress in 3 attempts, which all failed before the first step"),
        ([replace(KILLED, step=None)] * 3, ""),
        ([RAISED] * 3, "no progress in 3 attempts, which all failed before the first step"),
        ([RAISED, replace(RAISED, said="OSError: disk"), RAISED], ""),
        ([replace(KILLED, step=step) for step in range(6)], "all 5 restarts are used up (--max-restarts 5)"),
        ([replace(RAISED, code=2)], "exit code 2 before the first step means wrong use"),
        ([replace(KILLED, code=2)], ""),
    ],
)
def test_reasons_to_stop(failures: list[Failed], reason: str):
    found = reason_to_stop(failures, 5)
    assert found.startswith(reason) and bool(found) is bool(reason)


def test_backoff_grows_up_to_a_minute():
    assert [backoff_s(restart) for restart in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_save_is_progress():
    saved = replace(KILLED, saves=1)
    assert in_a_row([KILLED]) == 1
    assert in_a_row([KILLED, KILLED, KILLED]) == 3
    assert in_a_row([KILLED, KILLED, saved]) == 1
    assert in_a_row([saved, KILLED]) == 2


class Launched:
    """In the place of a launcher: the attempts fail as `ends` says."""

    ends: list[Any]

    gone = ()

    def __init__(self, job: Job) -> None:
        self.failed: Failed | None = None
        self._end = self.ends[job.attempt]

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self) -> int:
        if isinstance(self._end, int):
            return self._end
        self.failed = self._end
        return int(self._end.code)


@pytest.mark.parametrize(
    ("ends", "code", "waits", "report"),
    [
        ([0], 0, [], ""),
        ([143], 143, [], ""),
        ([KILLED, 0], 0, [1.0], "1 of 5 restarts; exit code 0"),
        ([KILLED, 75], 75, [1.0], "1 of 5 restarts; exit code 75"),
        ([KILLED, replace(RAISED, step=8), 130], 130, [1.0, 2.0], "2 of 5 restarts; exit code 130"),
        ([KILLED] * 5, 137, [1.0, 2.0], "2 of 5 restarts; no progress in 3 attempts"),
        ([replace(RAISED, code=2)], 2, [], ""),
    ],
)
def test_attempts(
    ends: list[Any], code: int, waits: list[float], report: str, monkeypatch: Any, capsys: Any
):  # fmt: skip
    monkeypatch.setattr(restarts, "Launcher", Launched)
    monkeypatch.setattr(Launched, "ends", ends, raising=False)
    waited: list[float] = []
    assert restarts.run(JOB, lambda seconds: waited.append(seconds) or 0) == code
    assert waited == waits
    told = capsys.readouterr().err
    assert f"weft: {report}" in told if report else told == ""
    assert told.count("  attempt ") == (len(waits) + 1 if report else 0)


def test_a_signal_before_a_restart_ends_the_job(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(restarts, "Launcher", Launched)
    monkeypatch.setattr(Launched, "ends", [KILLED, 0], raising=False)
    monkeypatch.setattr(restarts.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert restarts.run(JOB) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == "weft: restart 1 of 5 in 1 s\n"


HOSTS = [Host(name, ["ssh", name]) for name in ("a", "b", "c")]


def test_a_job_goes_on_with_the_hosts_that_are_left(capsys: pytest.CaptureFixture[str]):
    job = Job(["train.py"], 6, {"WEFT_SET": '{"partitions": 2}'}, hosts=HOSTS, least_hosts=2)
    left, reason = restarts.without(job, ["b"])
    assert ([host.name for host in left.hosts], left.ranks, reason) == (["a", "c"], 4, "")
    assert "weft: goes on without b: 4 ranks on a, c\n" in capsys.readouterr().err
    assert restarts.without(job, ["a", "b"]) == (job, "without a, b there are 1 hosts (--min-hosts 2)")
    assert restarts.without(job, []) == (job, "")
    assert restarts.without(replace(job, least_hosts=0), ["b"]) == (replace(job, least_hosts=0), "")
    odd = replace(job, environ={"WEFT_SET": '{"partitions": 3}'})
    assert restarts.without(odd, ["b"])[1].startswith(
        "without b there are 4 ranks, which the settings do not fit: 4 processes cannot be divided"
    )
