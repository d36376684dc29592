"""Starts jobs of several processes in tests, under a time limit, and finds what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import warm as forked

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
MARK = "WEFT_TEST_JOB"
"""The variable by which the processes of a job are found again."""
SESSION = "session "
"""Starts the mark of a warm job: its processes inherited their variables, but share a session."""
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "WEFT_")


def on_end(mark: str) -> None:
    """Told the mark of every job whose launcher has ended; `tests/fault` looks by it for what stays behind."""


@dataclass(frozen=True)
class Completed:
    """What a job left."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def check(self) -> Completed:
        """Fails the test, with all output, unless the job ended well."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


@dataclass
class Running:
    """A job that was started."""

    process: subprocess.Popen[str] | forked.Job
    mark: str
    started: float

    def wait(self, timeout: float) -> Completed:
        """The job's end; a test failure, with all output, if it does not come within `timeout` seconds."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end_all(self.mark)
            stdout, stderr = self.process.communicate()
            pytest.fail(f"the job did not end within {timeout} s\n{stdout}\n{stderr}")
        return Completed(self.process.returncode, stdout, stderr, time.monotonic() - self.started)

    def ranks(self) -> dict[int, int]:
        """The process of each rank, as far as they run."""
        return {int(found["RANK"]): pid for pid, found in _marked(self.mark).items() if "RANK" in found}

    def wait_for_line(self, text: str) -> str:
        """Reads the job's standard output up to a line with `text`."""
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        pytest.fail(f"no line with {text!r}:\n{seen}")


def run_ranks(
    n: int,
    script: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
    config: Mapping[str, Any] | None = None,
    launcher: str = "weft",
    options: Sequence[str] = (),
    warm: bool | str = False,
) -> Completed:
    """Runs a script, given as a path or as its source, on `n` processes to the end.

    Args:
        n: How many processes.
        script: The path of a script, or source text (with at least one line break).
        args: The script's arguments.
        env: Variables on top of the test's own.
        timeout: After how many seconds the test fails.
        config: Settings, handed over as `weft run --config` or in WEFT_CONFIG.
        launcher: weft, torchrun or mpirun; a test is skipped where mpirun is missing.
        options: More options of the launcher.
        warm: The ranks are forked from a process that has imported what they need; see `tests.warm`. True, or the name
            of a flavour there.
    """
    with started(n, script, args, env, config, launcher, options, warm) as job:
        return job.wait(timeout)


@contextlib.contextmanager
def started(
    n: int,
    script: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    launcher: str = "weft",
    options: Sequence[str] = (),
    warm: bool | str = False,
) -> Iterator[Running]:
    """A job that runs; at the end of the block its processes are killed if there are any left."""
    assert launcher == "weft" or not warm, "only weft's own launcher is forked"
    with tempfile.TemporaryDirectory() as folder:
        path = _written(script, folder)
        mark = uuid.uuid4().hex
        environ = {**_environ(env), MARK: mark}
        if config is not None and launcher != "weft":
            environ["WEFT_CONFIG"] = json.dumps(config)
        command = [*_launcher(launcher, n, config), *options, str(path), *args]
        process: subprocess.Popen[str] | forked.Job
        if warm:
            process = forked.start(
                command[command.index("run") :], environ, flavour=warm if isinstance(warm, str) else None
            )
            mark = f"{SESSION}{process.pid}"
        else:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        try:
            yield Running(process, mark, time.monotonic())
        finally:
            if process.poll() is not None:
                on_end(mark)
            end_all(mark)
            process.communicate()


def run_script(script: Path, *args: str, timeout: float = 900) -> str:
    """What a script of the tests wrote that forks its jobs itself; it has to end with "passed".

    It is forked from a process that has imported what the ranks need; see `tests.warm.Ranks`.
    """
    environ = _environ({"PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)])})
    job = forked.start([str(script), *args], environ, ROOT)
    done = Running(job, f"{SESSION}{job.pid}", time.monotonic()).wait(timeout).check()
    assert done.stdout.endswith("passed\n"), f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _written(script: str | Path, folder: str) -> Path:
    """The path of a script, which is written into the folder if it is given as source."""
    if "\n" not in str(script):
        return Path(script)
    path = Path(folder) / "script.py"
    path.write_text(str(script))
    return path


def _environ(env: Mapping[str, str] | None) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "WEFT_OPENING": "off",
        **(env or {}),
    }


def _launcher(name: str, n: int, config: Mapping[str, Any] | None) -> list[str]:
    if name == "weft":
        settings = ["--config", json.dumps(config)] if config is not None else []
        return [sys.executable, "-m", "weft", "run", "-n", str(n), *settings]
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    if name == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("mpirun is not installed")
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        return ["mpirun", *root, "--oversubscribe", "-np", str(n), sys.executable]
    raise ValueError(f"there is no launcher {name}")


def end_all(mark: str) -> None:
    """Kills what is left of a job."""
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_left(mark: str, seconds: float = 15.0) -> list[int]:
    """The processes of a job that still run after up to `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _marked(mark: str) -> dict[int, dict[str, str]]:
    """The living processes that carry a mark, with their variables."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                if f"{MARK}={mark}" in entries or f"{SESSION}{_session(folder)}" == mark:
                    found[int(folder.name)] = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return found


def _session(process: Path) -> int:
    """The session of a process that still runs, else 0; `process` is its folder in /proc."""
    state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
    return 0 if state in "ZX" else int(session)
