"""Hosts whose clocks differ: two processes, one of them in a time namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import SOURCE
from tests.long import one_day_in
from weft.analysis.messages import match
from weft.profiler.host.clocks import error_s, offsets
from weft.profiler.reading import read_recording

AHEAD_S = 5
JOB = """
import torch
from torch import nn
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 4})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]))

@weft.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss

for _ in range(3):
    train_step(model, torch.randn(8, 32))
"""


def _namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    made = subprocess.run(["unshare", "-f", "-T", "--monotonic", "1", "true"], capture_output=True)
    return made.returncode == 0


@one_day_in(3)
@pytest.mark.skipif(not _namespaces(), reason="needs root and a kernel with time namespaces")
def test_a_clock_that_is_ahead_is_found_within_the_bound(tmp_path: Path):
    """Without the exchange the clocks would count as one, and all of rank 1 would lie 5 s too late."""
    script, folder = tmp_path / "job.py", tmp_path / "recording"
    script.write_text(JOB)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    usual = {
        **os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "WEFT_SET": f'{{"record": "{folder}"}}',
    }  # fmt: skip
    ranks = []
    for rank in range(2):
        within = ["unshare", "-f", "-T", "--monotonic", str(AHEAD_S)] if rank else []
        environ = {**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(
                [*within, sys.executable, str(script)], env=environ, stderr=subprocess.PIPE, text=True
            )
        )
    for process in ranks:
        _, told = process.communicate(timeout=200)
        assert process.returncode == 0, told
    (known,) = [each for each in offsets(folder).values() if each.error_s]
    (file,) = folder.glob("host-*.clock.json")
    for _, offset_s, bound_s in json.loads(file.read_text())["marks"]:
        assert abs(offset_s + AHEAD_S) <= bound_s + 1e-9 < 1
    recording = read_recording(folder)
    messages = match(recording.timeline)
    assert messages
    for message in messages:
        assert message.arrived_s >= message.ready_s - 2 * known.error_s, message
    assert error_s(offsets(folder).values()) == known.error_s
