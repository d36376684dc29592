"""Every wait of weft is announced, judged and bounded, also where no step runs."""

from __future__ import annotations

import re

import pytest

from tests.launching import Completed, run_ranks
from tests.long import long, one_in

WHO = r"rank {} on \S+ \(pid \d+\) "
START = """
import sys, time, torch
from torch import nn
import weft.torch as weft
weft.init({"wait_timeout": WAIT, "partitions": PARTITIONS, "verify": "off"})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
@weft.step
def step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss
def plain(model, x):
    model(x).pow(2).mean().backward()
me = weft.rank()
"""


def run(body: str, wait: float = 60, partitions: int = 1, before: str = "") -> Completed:
    text = START.replace("WAIT", str(wait)).replace("PARTITIONS", str(partitions))
    return run_ranks(2, before + text + body, warm=True, timeout=90)


def first_line(done: Completed) -> str:
    """The first one of the report; what the log has said before is none of it."""
    return next((line for line in done.stderr.splitlines() if line.startswith("weft: ")), "")


LEFT = {
    "a step": ("step(model, torch.ones(2, 4))", "collective of the gradients"),
    "a plain backward pass": ("plain(model, torch.ones(2, 4))", "collective of the gradients"),
    "a barrier": ("weft.barrier()", "collective of barrier() of WORLD"),
    "shared_sampler": ("weft.shared_sampler(list(range(8)))", "collective of shared_sampler()"),
}


@pytest.mark.parametrize("what", one_in(4, LEFT))
def test_a_replica_that_has_left_is_named_by_one_that_waits(what: str):
    code, where = LEFT[what]
    done = run(f"for number in range(2 + me):\n    {code}\n")
    assert done.returncode == 1
    told = rf"weft: {WHO.format(0)}left at step \d while rank 1 still needs it: step \d, {re.escape(where)}"
    advice = r"\. (Call \w+\(\) on every rank, not under|Rank 0 .*: is a step under) `if weft\.rank\(\) == 0`"
    assert re.match(told + advice, first_line(done)), done.stderr


def test_a_rank_that_never_comes_to_init_is_left_behind_by_name():
    script = "import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(0)\nimport weft.torch as weft\nweft.init()\n"
    done = run_ranks(2, script, warm=True, timeout=60)
    assert done.returncode == 1
    told = rf"weft: {WHO.format(1)}left while rank 0 still needs it: wait of weft\.init$"
    assert re.match(told, first_line(done)), done.stderr


def test_a_rank_that_waits_in_a_backward_pass_is_judged_after_wait_timeout():
    done = run(
        "plain(model, torch.ones(2, 4))\nif me:\n    time.sleep(60)\nplain(model, torch.ones(2, 4))\n", 5
    )
    slow = rf"weft: no rank gets on: {WHO.format(1)}in step 0 for \d+\.\d s; "
    told = rf"{slow}{WHO.format(0)}in step 0, collective of the gradients"
    assert re.match(told, first_line(done)), done.stderr


@long
def test_a_collective_of_the_script_ends_after_wait_timeout():
    """Nobody announced it; so the collective's own time-out has to come."""
    done = run(
        "import torch.distributed as dist\nif me:\n    time.sleep(60)\ndist.all_reduce(torch.ones(1))\n", 5
    )
    assert done.returncode == 1
    assert re.match(
        rf"weft: {WHO.format(0)}failed.*: RuntimeError: .*Timed out waiting 10000ms", first_line(done)
    )


@long
def test_ranks_that_use_no_pipeline_for_long_lose_nothing():
    """What waits for messages between steps waits for nobody, however long that is."""
    body = "step(model, torch.ones(2, 4))\ntime.sleep(15)\nstep(model, torch.ones(2, 4))\nprint('both')\n"
    done = run(body, 8, 2, before="import weft.torch.join as join\njoin.rings_of = lambda *_: None\n").check()
    assert "both" in done.stdout


def test_ranks_that_wait_for_each_other_at_the_end_are_judged():
    body = """
from weft.watch.monitor import Monitor
Monitor._wait_for_all = lambda self: (self._board.enter(2), time.sleep(60))  # State.FINISHING, for ever
"""
    done = run(body, 5)
    told = rf"weft: all ranks wait for each other: {WHO.format(0)}in step 0, barrier of the job's end for \d+\.\d s; "
    assert re.match(told, first_line(done)), done.stderr


@pytest.mark.parametrize("partitions", [1, 2])
def test_people_count_steps_that_train(partitions: int):
    """Three steps, and two evaluations in between that a step counter would count too."""
    body = """
@weft.step
def evaluate(model, x):
    return model(x).mean()
for number in range(3):
    step(model, torch.ones(2, 4))
    if number < 2:
        model.eval()
        with torch.no_grad():
            evaluate(model, torch.ones(2, 4))
        model.train()
if me:
    raise ValueError("now")
weft.barrier()
"""
    done = run(body, partitions=partitions)
    assert re.match(rf"weft: {WHO.format(1)}failed in step 3: ValueError: now$", first_line(done)), (
        done.stderr
    )
