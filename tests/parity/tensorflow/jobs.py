"""Starts jobs of ranks that use TensorFlow: each imports it anew, for it does not survive a fork."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1"}


class Job:
    """A job of `weft run`; as much of ``subprocess.Popen`` as `tests.parity.jobs` uses."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft", *arguments], env={**env, **QUIET}, cwd=cwd, stdout=self._output,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.wait(timeout)
        self._output.seek(0)
        with self._output as output:
            return output.read(), ""


def start(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Job:
    """Start `weft ARGUMENTS` with variables in a folder."""
    return Job(arguments, env, cwd)


def run(arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float) -> tuple[int, str]:
    """The same to its end: the exit code and what it wrote; minus SIGKILL if it took `timeout` seconds."""
    job = start(arguments, env, cwd)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(timeout)
    if job.returncode is None:
        os.killpg(job.pid, signal.SIGKILL)
    output, _ = job.communicate()
    assert job.returncode is not None
    return job.returncode, output


def checks_of(worker: str) -> list[str]:
    """The checks of a worker in this folder, which is read: an import would bring TensorFlow into this process."""
    tree = ast.parse(Path(__file__).with_name(worker).read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id == "check" for each in node.decorator_list)
    ]
