"""The first step is compared with one process: right programs pass, wrong ones end the job; see `verified.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import one_in

from .jobs import ROOT

JOB = Path(__file__).parent / "verified.py"
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}

WRONG = {
    "scaled": "microbatch 0 .*The first module whose output differs is c .partition 1., which is given the same",
    "closure": "microbatch 0 .*The first module that differs is c .*look at the code between b and it",
    "counter": "microbatch 0 .*The first module whose output differs is c ",
    "rank": "microbatch 0 .*The first module whose output differs is d ",
    "other": "microbatch 1 .*The first module whose output differs is d ",
    "gradient": "the gradient of c.linear.weight .*c.linear is the first module that differs",
    "buffer": "the buffer d.norm.running_mean is another one than in one process",
}


@pytest.mark.parametrize(("ranks", "partitions"), one_in(3, [(4, 2), (2, 2), (3, 3)]))
def test_right_programs_pass(ranks: int, partitions: int):
    done = run_ranks(ranks, JOB, ["right", str(partitions)], env=PATHS, timeout=600, warm=True).check()
    assert done.stdout.count("passed") == ranks


@pytest.mark.parametrize("kind", ["right", *one_in(2, ["scaled", "counter", "rank"])])
def test_a_model_that_no_rank_can_hold_is_compared_by_unit(kind: str):
    done = run_ranks(2, JOB, [kind, "2", "large"], env=PATHS, timeout=600).check()
    assert done.stdout.count("passed") == 2
    if kind != "right":
        assert re.search(WRONG[kind], done.stdout), done.stdout


OPENING = """
import sys, torch
from torch import nn
import weft.torch as weft

weft.init({"microbatches": 2}, partitions=2)
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))

@weft.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

@weft.step
def evaluate(model, x):
    model(x)

if len(sys.argv) > 1:
    with torch.no_grad():
        evaluate(model, torch.randn(8, 4))
for _ in range(2):
    step(model, torch.randn(8, 4))
"""


def test_the_first_rank_says_what_was_split_and_proved():
    def lines(*options: str, args: Sequence[str] = ()) -> list[str]:
        shown = {"WEFT_OPENING": "on"}
        done = run_ranks(2, OPENING, args, shown, options=options, timeout=120, warm=True).check()
        return [line for line in done.stderr.splitlines() if line.startswith("weft: ")]

    (line,) = lines("--pipeline", "GPipe", "--microbatches", "4")
    assert re.fullmatch(
        r"weft: 2 partitions of \d and \d units \(\d+ % / \d+ % of the time\), GPipe, 4 microbatches; "
        r"step 1 equals one process \(\d+\.\d\d s\)",
        line,
    )
    assert lines("--partitions=1") == ["weft: 2 data-parallel replicas, 2 microbatches"]
    assert lines("--partitions=1", "--microbatches=auto", args=["evaluates"]) == [
        "weft: 2 data-parallel replicas, 1 microbatch"
    ]
    (line,) = lines("--verify=off")
    assert line.endswith(", 1F1B, 2 microbatches; verify is off")
    (line,) = lines(args=["evaluates"])
    assert re.search(r"; step 1 has nothing to compare with one process \(\d", line), line
    assert lines("--quiet") == []


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_programs_end_the_job_before_a_weight_changes(kind: str):
    done = run_ranks(2, JOB, [kind], env=PATHS, timeout=300, warm=True).check()
    found = [line for line in done.stdout.splitlines() if "found: " in line]
    assert len(found) == 2, done.stdout
    for line in found:
        assert re.search(WRONG[kind], line), line
        assert '"verify": "off"' in line and "weft.set_partition(" in line


SCRIPT = """
import sys, torch
from torch import nn
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 2, "auto_partition": False})
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
model = weft.DistributedModel(net)
weft.set_partition(net[2], 1)
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if sys.argv[1] == "wrong" and weft.pp_rank():
    net[2].weight.register_hook(lambda grad: grad * 2)

@weft.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for _ in range(9):
    optimizer.zero_grad()
    train(model, torch.ones(4, 4))
    optimizer.step()
    assert _ < 2, "the job goes on after three steps"
"""


@pytest.mark.parametrize(("kind", "code"), one_in(2, [("wrong", 1), ("right", 0)]))
def test_the_command_compares_three_steps_under_each_schedule(
    tmp_path: Path, kind: str, code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from weft.cli.main import main

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", PATHS["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = "1f1b,zb_h1" if kind == "right" else "gpipe"
    assert main(["verify", "-n", "2", "--schedules", names, str(script), kind]) == code
    rows = [
        line.split()
        for line in capfd.readouterr().out.splitlines()
        if line.startswith(tuple(names.split(",")))
    ]
    assert [row[:2] for row in rows] == [[name, str(step)] for name in names.split(",") for step in (1, 2, 3)]
    for row in rows:
        assert (row[4:] == ["equal"]) == (kind == "right"), row
