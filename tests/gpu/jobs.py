"""Starts jobs whose ranks see the machine's GPUs, which other tests hide from theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpus import KEPT, VISIBLE

Start = Callable[[Sequence[str], Mapping[str, str], Path], Any]
OWN = Path(__file__).with_name("own_gpus.py")
EMULATED = Path(__file__).with_name("emulated.py")


class Job(subprocess.Popen[str]):
    """`weft ARGUMENTS`, in a session of its own; what it writes goes to files."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self._files = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]
        super().__init__(
            [sys.executable, "-m", "weft", *arguments],
            env={**env, VISIBLE: os.environ[KEPT]},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
        )

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:  # type: ignore[override]
        """What it wrote, after its end."""
        self.wait(timeout)
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read())
        return texts[0], texts[1]


def sharing(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Job:
    """Ranks that share a GPU: their messages go through host memory."""
    return Job(arguments, env, cwd)


def owning(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Job:
    """Ranks that think that each has a GPU of its own: their messages go through NCCL."""
    return Job(_behind(OWN, arguments), env, cwd)


def emulated(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Job:
    """Ranks that share a GPU which is not there; see `emulated.py`."""
    return Job(_behind(EMULATED, arguments), env, cwd)


def emulated_apart(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Job:
    """The same, but each rank thinks that the GPU is its own; what stands for NCCL is gloo."""
    return Job(_behind(EMULATED, _behind(OWN, arguments)), env, cwd)


def _behind(script: Path, arguments: Sequence[str]) -> list[str]:
    """The arguments with this script before the one that they name."""
    at = next(at for at, given in enumerate(arguments) if given.endswith(".py"))
    return [*arguments[:at], str(script), *arguments[at:]]
