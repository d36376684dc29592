"""What `weft run` refuses, and what it hands to its ranks; nothing is started here."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from weft.cli import run
from weft.cli.main import main
from weft.launch.discovery import discover
from weft.launch.environ import free_port, master_environ, rank_environ
from weft.launch.rank import FILE, MODULE
from weft.launch.running.job import Job


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that would have been started."""
    started: list[Job] = []
    monkeypatch.setattr(run.restarts, "run", lambda job: started.append(job) or 0)
    for name in ("WEFT_CONFIG", "WEFT_SET"):
        monkeypatch.delenv(name, raising=False)
    return started


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train it.py"
    path.touch()
    return str(path)


def test_everything_after_the_script_is_passed_on(jobs: list[Job], script: str):
    assert main(["run", "-n", "2", script, "-n", "3", "--set", "a b", ";", "--"]) == 0
    assert jobs[0].command == [sys.executable, FILE, script, "-n", "3", "--set", "a b", ";", "--"]
    assert (jobs[0].ranks, jobs[0].prefix) == (2, "others")
    assert "WEFT_CONFIG" not in jobs[0].environ and "WEFT_SET" not in jobs[0].environ


def test_options_of_the_script_that_begin_like_those_of_weft(jobs: list[Job], script: str):
    given = ["--rank", "1", "--re", "--t", "--m=2"]
    assert main(["run", "-n", "2", script, *given]) == 0
    assert jobs[0].command == [sys.executable, FILE, script, *given]


def test_a_module_and_a_separator(jobs: list[Job], script: str):
    main(["run", "-m", "package.train", "-x"])
    main(["run", "--", script, "-x"])
    assert jobs[0].command == [sys.executable, FILE, MODULE, "package.train", "-x"]
    assert jobs[1].command == [sys.executable, FILE, script, "-x"]


def test_settings_become_variables(jobs: list[Job], script: str):
    main(
        ["run", "-n", "4", "--config", '{"partitions": 2}', "--set", "microbatches=8"]
        + ["--timeout-heartbeat", "2", "--timeout-wait", "5", "--prefix", "all", script]
    )
    assert jobs[0].environ["WEFT_CONFIG"] == '{"partitions": 2}'
    assert json.loads(jobs[0].environ["WEFT_SET"]) == {
        "microbatches": 8,
        "heartbeat_timeout": 2.0,
        "wait_timeout": 5.0,
    }
    assert jobs[0].prefix == "all"


def test_settings_of_the_environment_stay(
    jobs: list[Job], script: str, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WEFT_SET", '{"partitions": 2, "microbatches": 4}')
    main(["run", "-n", "4", "--record", str(tmp_path), "--set", "microbatches=8", script])
    assert json.loads(jobs[0].environ["WEFT_SET"]) == {
        "partitions": 2, "microbatches": 8, "record": str(tmp_path),
    }  # fmt: skip


def test_a_recording_goes_where_the_launcher_stands(jobs: list[Job], script: str, tmp_path, monkeypatch):
    """A script may change its directory, so its ranks are told the whole path."""
    monkeypatch.chdir(tmp_path)
    main(["run", "--record", "here", script])
    assert json.loads(jobs[0].environ["WEFT_SET"]) == {"record": str(tmp_path / "here")}


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """The programs that this process would have become."""
    found: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(run.os, "execve", lambda *call: found.append(call))
    monkeypatch.setattr(run.shutil, "which", lambda name, path: f"/usr/bin/{name}")
    return found


def test_mpirun_gets_options_and_variables(jobs, replaced, script, monkeypatch):
    monkeypatch.setenv("KNOWN", "1")
    options = ["--engine", "mpirun", "--mpi-options", "-H a:2,b:2", "-x", "KNOWN", "-x", "NEW=a=b"]
    run_main = ["run", "-n", "4", "--set", "partitions=2", *options, script, "-x", "5"]
    with pytest.raises(TypeError):  # only because nothing was replaced here
        main(run_main)
    ((path, command, environ),) = replaced
    assert path == "/usr/bin/mpirun" and command[:3] == ["mpirun", "-np", "4"]
    assert command[3:7] == ["-x", "KNOWN", "-x", "NEW"] and "WEFT_SET" in command
    assert command[-7:] == ["-H", "a:2,b:2", sys.executable, FILE, script, "-x", "5"]
    assert (environ["KNOWN"], environ["NEW"], environ["WEFT_SET"]) == ("1", "a=b", '{"partitions": 2}')
    assert environ["PYTHONUNBUFFERED"] == "1" and jobs == []
    token = environ["WEFT_TOKEN"]
    assert len(token) == 32 and "WEFT_TOKEN" in command and not any(token in part for part in command)


def test_variables_for_the_ranks_of_this_machine(jobs: list[Job], script: str):
    main(["run", "-x", "NEW=7", script])
    assert jobs[0].environ["NEW"] == "7"


def test_mpirun_must_be_there(jobs, script, monkeypatch, capsys):
    monkeypatch.setattr(run.shutil, "which", lambda name, path: None)
    assert main(["run", "--engine", "mpirun", script]) == 2
    assert "mpirun is not installed: install Open MPI" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mpi-options=-H a", "run.py"], "--mpi-options is for mpirun: add --engine mpirun"),
        (
            ["--engine", "mpirun", "--prefix", "all", "run.py"],
            "--prefix is not for mpirun: use --mpi-options",
        ),
        (["-x", "NOT_SET_ANYWHERE", "run.py"], "there is no such variable, give it a value with -x NOT_SET"),
        (["--"], "no script is given: weft run -n 2 train.py"),
        (["x" * 5000], "is no script (File name too long)"),
        (["-n", "0", "x.py"], "-n is 0: it must be at least 1"),
        (["-n", "2"], "no script is given: weft run -n 2 train.py"),
        (["-n", "2", "nowhere.py"], 'there is no file "nowhere.py"'),
        (["-n", "2", "--set", "micro_batches=2", "x.py"], 'did you mean "microbatches"?'),
        (
            ["-n", "3", "--set", "partitions=2", "x.py"],
            "3 processes cannot be divided into pipelines of 2 partitions",
        ),
        (["-n", "2", "--timeout-wait", "-1", "x.py"], "wait_timeout is -1.0"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], text: str, jobs: list[Job], capsys: pytest.CaptureFixture[str]
):
    assert main(["run", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert jobs == []


def test_the_variables_of_a_rank():
    environ = rank_environ({"PATH": "/bin"}, 1, 2, cores=8)
    assert {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert environ["OMP_NUM_THREADS"] == "4" and environ["PATH"] == "/bin"
    assert environ["MALLOC_TRIM_THRESHOLD_"] == environ["MALLOC_MMAP_THRESHOLD_"] == str(1 << 30)
    assert environ["MALLOC_ARENA_MAX"] == "1"
    assert rank_environ({}, 0, 4, cores=2)["OMP_NUM_THREADS"] == "1"
    kept = rank_environ({"OMP_NUM_THREADS": "3", "MALLOC_TRIM_THRESHOLD_": "1", "RANK": "9"}, 0, 1, cores=2)
    assert (kept["OMP_NUM_THREADS"], kept["MALLOC_TRIM_THRESHOLD_"], kept["RANK"]) == ("3", "1", "0")


@pytest.mark.parametrize("option", ["-n", "-np", "--np", "--ranks", "--nproc-per-node", "--nproc_per_node"])
def test_the_number_of_processes_has_the_names_of_other_launchers(option, jobs, script):
    main(["run", option, "2", script, "-np", "7"])
    assert jobs[0].ranks == 2 and jobs[0].command[-2:] == ["-np", "7"]


def test_the_variables_of_torchrun():
    """All that PyTorch 2.13's agent sets, but for what tells that the agent itself is there."""
    own = {**rank_environ({}, 1, 2, cores=8), **master_environ(4711)}
    assert {name: own[name] for name in ("GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "GROUP_WORLD_SIZE")} == {
        "GROUP_RANK": "0", "ROLE_RANK": "1", "ROLE_NAME": "default", "GROUP_WORLD_SIZE": "1"
    }  # fmt: skip
    assert (own["MASTER_ADDR"], own["MASTER_PORT"], own["ROLE_WORLD_SIZE"]) == ("127.0.0.1", "4711", "2")
    assert own["TORCHELASTIC_RUN_ID"] and own["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert discover({**own, "WEFT_SHARED_FD": "7"}).source == "weft"


def test_the_port_is_kept_for_the_one_who_asks_for_it():
    held, environ = free_port()
    address = ("127.0.0.1", int(environ["MASTER_PORT"]))
    with held, socket.socket() as stranger, socket.socket(socket.AF_INET6) as ours:
        with pytest.raises(OSError):
            stranger.bind(address)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as PyTorch's store does
        ours.bind(("::", address[1]))
        ours.listen()
        with socket.create_connection(address, 10):
            pass


def test_the_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("weft 0.")


def test_restarts_are_the_launchers(jobs: list[Job], script: str, monkeypatch: pytest.MonkeyPatch, capsys):
    again: list[Job] = []
    monkeypatch.setattr(run.restarts, "run", lambda job: again.append(job) or 75)
    assert main(["run", "--max-restarts", "3", script]) == 75
    assert [job.restarts for job in again] == [3] and jobs == []
    assert main(["run", "--max-restarts", "3", "--dry-run", script]) == 0
    assert "note: started again after a failure, up to 3 times" in capsys.readouterr().out
    assert main(["run", "--max-restarts", "3", "--engine", "mpirun", script]) == 2


def test_an_interrupt_that_comes_when_there_is_nothing_to_end_is_no_traceback(script, monkeypatch):
    def interrupted(job: Job) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.cli.run.restarts.run", interrupted)
    assert main(["run", "-n", "2", script]) == 130
