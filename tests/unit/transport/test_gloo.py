"""The real channel between two processes; the checks stand in `gloo_pair.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import FOREIGN, SOURCE

from .gloo_pair import CHECKS

ROOT = SOURCE.parent


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, int]]:
    """Runs all checks once; what a rank printed, and its exit code."""
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    environ = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    environ |= {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.transport.gloo_pair", str(meeting), *CHECKS],
            env={**environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            cwd=Path(ROOT),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return lambda rank: (outputs[rank], processes[rank].returncode)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [name for name in CHECKS if name != "peer_killed"])
def test_both_ranks_pass(name: str, rank: int, pair: Callable[[int], tuple[str, int]]):
    output, _ = pair(rank)
    assert f"{name} passed" in output, output


def test_a_killed_peer_is_a_peer_error(pair: Callable[[int], tuple[str, int]]):
    output, code = pair(0)
    assert "peer_killed passed" in output, output
    assert code == 0
    assert pair(1)[1] == -signal.SIGKILL
