"""A file that does not answer: who stands in it, and who waits for that, is told while it is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import SOURCE, Running, started
from tests.long import one_in
from weft.watch.files.blocked_ranks import Standing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux shows in what a process stands")
WHO = r"weft: rank {} on \S+ \(pid \d+\) "
SCRIPT = """
import ctypes, sys, time, torch
from torch import nn
import weft.torch as weft
how, pipe, folder = sys.argv[1:]
weft.init({"partitions": 2, "verify": "off", "record": folder + "/out"})
model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
@weft.step
def step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss
step(model, torch.ones(2, 4))
me = weft.rank()
class Batches(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return open(pipe, "rb").read()
    def __len__(self):
        return 1
if how == "save":
    class Slow:
        def state_dict(self):
            return {"read": open(pipe, "rb").read() if me == 1 else b""}
        def load_state_dict(self, state):
            pass
    weft.save_checkpoint(folder + "/ck", "last", model=model, optimizer=optimizer, also={"slow": Slow()})
elif how == "loader" and me == 1:
    next(iter(torch.utils.data.DataLoader(Batches(), 1, num_workers=1, collate_fn=list)))
elif how == "lock" and me == 1:
    descriptor = ctypes.PyDLL(None).open(pipe.encode(), 0)  # Python's lock is held
    ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(8), 8)
elif how == "read" and me == 1:
    open(pipe, "rb").read()
step(model, torch.ones(2, 4))
print("trained", flush=True)
"""


def told(folder: Path, job: Running) -> Standing:
    """What is told of the job, once all of its other rank is."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and job.process.poll() is None:
        standing = Standing.read(folder)
        if standing.operations and standing.waiting:
            return standing
        time.sleep(0.1)
    return Standing()


def weft(*arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "weft", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize(
    ("how", "launcher"),
    [
        ("read", "weft"),
        ("lock", "weft"),
        *one_in(3, [("save", "weft"), ("loader", "torchrun"), ("lock", "torchrun")]),
    ],
)
def test_a_rank_that_waits_for_a_file_is_named_and_nobody_is_frozen(how: str, launcher: str, tmp_path: Path):
    pipe, runs = tmp_path / "part-3", tmp_path / "runs"
    os.mkfifo(pipe)
    given, options = [how, str(pipe), str(tmp_path)], ["--log-dir", str(runs), "--timeout-heartbeat", "4"]
    own = launcher == "weft"
    config = None if own else {"heartbeat_timeout": 4.0}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with started(
        2, script, given, config=config, launcher=launcher, options=options if own else [], warm=own
    ) as job:
        standing = told(runs / "attempt-0" if own else tmp_path / "out", job)
        where = " in its process" if how == "loader" else ""
        assert standing.operations[1][0].startswith(f"opens {pipe}{where}")
        assert standing.waiting == {0: 1}
        waits = rf"rank 1, which opens {re.escape(str(pipe))}.* for \d"
        if own:
            assert re.search(rf"^  rank 0 waits for {waits}", weft("status", str(runs)), re.M)
        if how != "lock":  # then no thread of that rank can tell the recording
            assert re.search(rf"^0 .*{waits}", weft("top", str(tmp_path / "out"), "--once"), re.M)
        descriptor = os.open(pipe, os.O_RDWR)
        time.sleep(3 if how == "read" else 0)
        os.write(descriptor, b"12345678")
        os.close(descriptor)
        done = job.wait(60).check()
    assert done.stdout.count("trained") == 2
    said = WHO.format(1) + rf"opens {re.escape(str(pipe))}.* for \d.*; waiting for rank 1: rank 0$"
    assert re.search(said, done.stderr, re.M), done.stderr
    if how == "read":  # the others come to their end at once
        assert re.search(WHO.format(1) + r"goes on: it stood still for .* \(opens ", done.stderr), done.stderr
    assert "frozen" not in done.stderr
