"""What ranks leave behind where no launcher of weft's hears them, and what is made of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from weft.errors import LaunchError
from weft.launch.engines.described import Described
from weft.launch.engines.mpirun import plan
from weft.launch.journal.batch import main
from weft.launch.journal.failure_report import failure, statements
from weft.launch.journal.job_status import read, stop
from weft.launch.journal.journal import Journal, log_files
from weft.launch.rank import FILE
from weft.watch.progress_file import Pace
from weft.watch.statement import FOLDER, Statement, path_of, reach


def say(folder: Path, by: int, rank: int, **more: Any) -> None:
    said = Statement(by, rank, more.pop("headline", f"rank {rank} failed"), **more)
    path_of(folder, by).write_text(json.dumps(said.__dict__))


def test_who_failed_itself_is_blamed_before_who_was_seen_to_be_gone(tmp_path: Path):
    say(tmp_path, 0, 2, kind="gone", time=1.0)
    say(tmp_path, 1, 1, victim=True, time=0.5)
    say(tmp_path, 2, 2, details="Traceback", time=3.0, host="node2", headline="rank 2 failed: boom")
    say(tmp_path, 3, 3, time=4.0, headline="rank 3 failed, too")
    assert failure(tmp_path, 4, 7) == {
        "rank": 2, "host": "node2", "headline": "rank 2 failed: boom", "details": "Traceback", "code": 7,
        "others": "also, rank 3 failed, too\nrank 1 then lost its connection", "kind": "failed",
    }  # fmt: skip
    path_of(tmp_path, 2).unlink()
    path_of(tmp_path, 3).unlink()
    assert (failure(tmp_path, 4, 7)["rank"], failure(tmp_path, 4, 7)["kind"]) == (2, "gone")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"by": 0}', '{"by": 1, "rank": "x"}', "\xff"])
def test_what_is_no_statement_counts_as_none(text: str, tmp_path: Path):
    path_of(tmp_path, 0).write_text(text, encoding="latin-1")
    path_of(tmp_path, 1).symlink_to("/etc/passwd")
    say(tmp_path, 3, 2)
    path_of(tmp_path, 3).rename(path_of(tmp_path, 2))  # another rank's
    assert statements(tmp_path, 4) == []
    told = failure(tmp_path, 4, 7)
    assert told["rank"] is None and "exit code 7, and no rank said why" in told["headline"]


def test_what_steers_a_terminal_is_written_out(tmp_path: Path):
    say(tmp_path, 0, 0, headline="\x1b[31mred")
    assert "\x1b" not in failure(tmp_path, 1, 1)["headline"]


@pytest.mark.parametrize(("code", "said"), [("7", True), ("0", False), ("75", False)])
def test_a_rank_says_that_it_ends_itself(code: str, said: bool, tmp_path: Path):
    (tmp_path / "a.py").write_text(f"raise SystemExit({code})\n")
    environ = {**os.environ, FOLDER: str(tmp_path), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
               "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    environ.pop("WEFT_SHARED_FD", None)
    say(tmp_path, 0, 0, headline="of an earlier start")
    done = subprocess.run([sys.executable, FILE, "a.py"], cwd=tmp_path, env=environ, timeout=60, check=False)
    assert done.returncode == int(code)
    assert [each.headline.endswith("ended with exit code 7") for each in statements(tmp_path, 1)] == [
        True
    ] * said


def test_rank_0_says_how_far_the_job_is(tmp_path: Path, monkeypatch):
    journal = Journal(tmp_path, {"script": "a.py", "ranks": 2, "engine": "mpirun"})
    logs = journal.begin(0, 2, by_engine=True)
    monkeypatch.setenv(FOLDER, str(logs))
    pace = Pace()
    reach(pace, 0, last=True)
    assert read(tmp_path).step is None
    reach(pace, 7)
    reach(pace, 9)
    assert read(tmp_path).step == {"step": 7, "time": ANY}  # the next one is put off for a second
    assert re.search(r"\n  step 7, which began .*s ago\n", "\n".join([*read(tmp_path).lines(), ""]))
    reach(pace, 9, last=True)
    assert read(tmp_path).step == {"step": 9, "time": ANY, "steps_per_minute": ANY}
    for damaged in ("{", "[]", '{"step": "9", "time": 1.0}', '{"step": 9, "time": 1e99}'):
        (logs / "step.json").write_text(damaged)
        assert read(tmp_path).step is None
    journal.close()


def test_the_rate_is_that_of_the_last_minute():
    pace = Pace()
    told = [pace.reach(step, 1000.0 + 10 * step) for step in range(1, 20)]
    slower = [pace.reach(19 + step, 1190.0 + 30 * step) for step in range(1, 4)]
    assert [each["steps_per_minute"] for each in told[1:] if each] == [6.0] * 18
    assert slower[-1] == {"step": 22, "time": 1280.0, "steps_per_minute": 2.0}
    assert pace.reach(22, 1300.0) is None and pace.reach(22, 1301.0, last=True) is None


def test_a_batch_script_tells_the_folder(tmp_path: Path, capsys, monkeypatch):
    journal = Journal(tmp_path, {"script": "a.py", "ranks": 2, "engine": "slurm"})
    journal.note("handed in", job="42")
    journal.close()
    assert "Slurm has it as job 42; squeue -j 42 says" in next(read(tmp_path).lines())
    with pytest.raises(LaunchError, match="Slurm has the job of .*: end it with scancel 42"):
        stop(tmp_path)
    assert main(["begin", str(tmp_path), "2", "0"]) == 0
    logs = Path(capsys.readouterr().out.strip())
    assert logs == tmp_path / "attempt-0" and logs.is_dir()
    say(logs, 1, 1, headline="rank 1 failed: boom")
    assert main(["again", str(tmp_path), "2", "1"]) == 0 and read(tmp_path).code is None
    monkeypatch.setenv("WEFT_ATTEMPT", "1")
    assert main(["begin", str(tmp_path), "2", "1"]) == main(["end", str(tmp_path), "2", "0"]) == 0
    told = read(tmp_path)
    assert told.code == 0 and told.logs == 1 and told.failure is not None and told.failure["rank"] == 1
    lines = "\n".join(told.lines())
    assert "attempt 0: failed" in lines and "attempt 1: logs in attempt-1" in lines and "exit code 0" in lines
    with pytest.raises(LaunchError, match="give begin, end or again"):
        main(["begin", str(tmp_path), "x", "0"])


def test_where_engines_write_what_a_rank_wrote(tmp_path: Path):
    assert log_files(tmp_path, 0, 3) == [tmp_path / "attempt-0" / "rank-3.log"]
    (tmp_path / "attempt-0" / "rank.03").mkdir(parents=True)
    assert log_files(tmp_path, 0, 3)[0] == tmp_path / "attempt-0" / "rank.03" / "stdout"
    assert log_files(tmp_path, 0, 30) == [tmp_path / "attempt-0" / "rank-30.log"]
    for number in (2, 10):
        (tmp_path / "attempt-1" / "none_x" / f"attempt_{number}" / "3").mkdir(parents=True)
    place = tmp_path / "attempt-1" / "none_x" / "attempt_10" / "3"
    assert log_files(tmp_path, 1, 3) == [place / "stdout.log", place / "stderr.log"]


def test_mpirun_is_told_where_ranks_write():
    for form, told in (("openmpi4", "--output-filename logs:nojobid"), ("openmpi5", "--output dir=logs")):
        (command,) = plan(Described("a.py", engine="mpirun", form=form, log_dir="logs"), {}).commands
        assert told in " ".join(command.arguments)
