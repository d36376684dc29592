"""Whatever a test of faults does, nothing of its jobs may stay behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import launching

FOREIGN = ("__autograph", "__pycache__", "torchinductor_", "torchelastic_", "ompi.")
"""Files that TensorFlow, PyTorch and Open MPI leave: code they wrote, caches, logs, the folder of a killed mpirun."""


@pytest.fixture(autouse=True)
def nothing_stays_behind(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No process of a job that has ended, no file in the temporary folder of jobs, nothing of weft's in /dev/shm."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    left: list[int] = []
    monkeypatch.setattr(launching, "on_end", lambda mark: left.extend(launching.processes_left(mark)))
    yield
    assert left == [], "processes"
    assert [path.name for path in temporary.iterdir() if not path.name.startswith(FOREIGN)] == []
    assert [name for name in os.listdir("/dev/shm") if "weft" in name] == []
