"""The page of a job that runs."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.cli import run
from weft.cli.live import fresh_page as fresh_page_module
from weft.cli.live.fresh_page import fresh_page
from weft.cli.main import main
from weft.errors import LaunchError
from weft.launch.running.job import Job
from weft.profiler.detail import REPORT


def use_writer(monkeypatch: pytest.MonkeyPatch, write_page) -> None:
    monkeypatch.setitem(sys.modules, "weft.cli.report", SimpleNamespace(write_page=write_page))


def test_it_is_written_at_the_end_also_after_a_failure(tmp_path: Path, monkeypatch):
    pages: list[Path] = []
    use_writer(monkeypatch, pages.append)
    with fresh_page(tmp_path):
        (tmp_path / "rank0.steps.jsonl").touch()
        assert pages == []
    with pytest.raises(LaunchError), fresh_page(tmp_path):
        (tmp_path / "rank1.steps.jsonl").touch()
        raise LaunchError("a rank has failed")
    assert pages == [tmp_path, tmp_path]


def test_of_an_earlier_job_none_is_written(tmp_path: Path, monkeypatch, capsys):
    pages: list[Path] = []
    use_writer(monkeypatch, pages.append)
    (tmp_path / "rank0.steps.jsonl").write_text("of an earlier job")
    with fresh_page(tmp_path):
        pass
    assert pages == []
    assert capsys.readouterr().err == (
        f"weft: this job recorded nothing into {tmp_path}: the script never called weft.init\n"
    )


def test_one_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch, capsys):
    def fails(folder: Path) -> None:
        raise ValueError("no such template")

    use_writer(monkeypatch, fails)
    with fresh_page(tmp_path):
        pass
    assert "recorded nothing into" in capsys.readouterr().err
    with fresh_page(tmp_path):
        (tmp_path / "rank0.steps.jsonl").touch()
    assert capsys.readouterr().err == f"weft: the page of {tmp_path} cannot be written: no such template\n"


def test_it_is_written_meanwhile_by_a_process_of_its_own(tmp_path: Path, monkeypatch):
    use_writer(monkeypatch, lambda folder: None)
    written = tmp_path / "written"
    monkeypatch.setattr(
        fresh_page_module, "_WRITE", f"import sys; open({str(written)!r}, 'a').write(sys.argv[1])"
    )
    with fresh_page(tmp_path, every_s=0.01):
        (tmp_path / "rank0.steps.jsonl").touch()
        until = threading.Event()
        for _ in range(1200):
            if written.exists() and written.read_text():
                break
            until.wait(0.05)
    assert written.read_text().startswith(str(tmp_path))


def test_a_page_that_takes_long_does_not_hold_the_job_up(tmp_path: Path, monkeypatch):
    use_writer(monkeypatch, lambda folder: None)
    began = tmp_path / "began"
    partial = f"open({str(tmp_path / '.report.html.')!r} + str(os.getpid()), 'w').write('<html>')"
    monkeypatch.setattr(
        fresh_page_module, "_WRITE",
        f"import os, time; {partial}; open({str(began)!r}, 'w').close(); time.sleep(1000)",
    )  # fmt: skip
    with fresh_page(tmp_path, every_s=0.01):
        (tmp_path / "rank0.steps.jsonl").touch()
        until = threading.Event()
        for _ in range(1200):
            if began.exists():
                break
            until.wait(0.05)
    assert began.exists() and not list(tmp_path.glob(".report.html.*"))


def test_a_page_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fresh_page_module, "_WRITE", "import time; time.sleep(1000)")
    fresh_page_module._write_beside(tmp_path, threading.Event(), longest_s=0.0)


def test_weft_run_records_what_a_report_needs(tmp_path: Path, monkeypatch, capsys):
    jobs: list[Job] = []
    monkeypatch.setattr(run.restarts, "run", lambda job: jobs.append(job) or 3)
    for name in ("WEFT_CONFIG", "WEFT_SET"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "train.py"
    script.touch()
    out = str(tmp_path / "out")
    assert main(["run", "--report", out, str(script)]) == 3
    assert json.loads(jobs[0].environ["WEFT_SET"]) == {"record": out, "record_steps": REPORT}
    main(["run", "--report", out, "--set", "record_steps=all", str(script)])
    assert json.loads(jobs[1].environ["WEFT_SET"]) == {"record": out, "record_steps": "all"}
    main(["run", "--report", out, "--config", '{"record_steps": "1-2"}', str(script)])
    assert json.loads(jobs[2].environ["WEFT_SET"]) == {"record": out}
    capsys.readouterr()
    assert main(["run", "--report", out, "--record", out, str(script)]) == 2
    assert "--report records, too: leave --record out" in capsys.readouterr().err
