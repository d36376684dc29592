"""Natural mistakes: the first lines name the script's own line, the cause, and what to write."""

from __future__ import annotations

import re

import pytest

from tests.launching import Completed, run_ranks

HEAD = """
import os, signal, sys, time, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader
import weft.torch as weft
from weft.watch.failure import Failure
from weft.watch.heartbeat import Sign

weft.init({"partitions": 2, "microbatches": 2})
torch.manual_seed(0)
x, y = torch.randn(8, 8), torch.randn(8, 4)


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@weft.step
def evaluate(model, x, y):
    return nn.functional.mse_loss(model(x), y)


@weft.step
def train_step(model, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    model.backward(loss)
    return loss


model = weft.DistributedModel(net())
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
"""


def run(script: str, code: int = 1) -> Completed:
    done = run_ranks(2, HEAD + script, warm=True, timeout=60, options=["--quiet"])
    assert done.returncode == code, done.stderr
    return done


SAID = """
def told(call):
    try:
        call()  # this line
    except Exception as error:
        failure = Failure.of(error, 0, Sign())
        return failure.headline().partition(" failed: ")[2], failure.details()
    raise AssertionError("no error")


def refused(call, text, whole=True):
    headline, details = told(call)
    assert text in headline, headline
    lines = details.splitlines()
    assert lines[0].startswith("at ") and "script.py, line " in lines[0], details
    assert not whole or not any("weft/" in line and "script.py" not in line for line in lines), details


def warned(call, text):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
        call()
    assert [each.filename for each in found] == [__file__] * (weft.rank() == 0), [str(each) for each in found]
    assert all(text in str(each.message) for each in found), [str(each.message) for each in found]


refused(lambda: train_step(model, x.to("meta"), y), "UsageError: x is on the device meta, where tensors have no data")
evaluate(model, x, y)
warned(optimizer.step, "SGD.step() trains nothing: no step has had a backward pass")
train_step(model, x, y)
warned(torch.optim.SGD(model.parameters(), 0.1).step, "write optimizer = weft.DistributedOptimizer(SGD(...))")
refused(lambda: train_step(model, x, [y, y.to("meta")]), "UsageError: y[1] is on the device meta")
refused(lambda: model(x), "call it inside a function decorated with @weft.step")
refused(lambda: evaluate(model, x, y).reduce_mean().backward(), "NoGraphError: the loss has no graph, as what a step")
names = [f"{number}.{kind}" for number in (10, 2) for kind in ("weight", "bias")]
line, none = nn.Linear(8, 8), nn.Identity()
many = weft.DistributedModel(nn.Sequential(*[none] * 2, line, *[none] * 7, nn.Linear(8, 8)))
refused(
    lambda: many.load_state_dict({f"net.{name}.x": torch.zeros(8) for name in names}),
    'the state does not fit the model: the names in the state begin with "net." and end in ".x": load '
    '{name.removeprefix("net.").removesuffix(".x"): value for name, value in state.items()}; '
    "2.bias is missing; 2.weight is missing; 10.bias is missing",
)
refused(lambda: model.load_state_dict({"a": 1}), "2.weight is missing; a is not part of the model")
refused(
    lambda: weft.DistributedModel(nn.Sequential(nn.parallel.DistributedDataParallel(net()))),
    "the model has a DistributedDataParallel inside",
)
"""


def test_mistakes_that_one_call_shows():
    run(SAID, 0)


FAILS = {
    "an exception in a loader's worker": (
        """
class Broken:
    def __len__(self):
        return 8

    def __getitem__(self, at):
        raise ValueError("image 3 is broken")  # here


for batch in DataLoader(Broken(), num_workers=1):
    pass
""",
        r"rank \d on \S+ \(pid \d+\) failed: ValueError: image 3 is broken \(in DataLoader worker process 0\)",
        r'at \S+script\.py, line \d+, in __getitem__: raise ValueError\("image 3 is broken"\)  # here',
    ),
    "a loader's worker that is killed": (
        """
class Killed:
    def __len__(self):
        return 8

    def __getitem__(self, at):
        os.kill(os.getpid(), signal.SIGKILL)


batches = iter(DataLoader(Killed(), num_workers=1))
train_step(model, x, y)
next(batches)
""",
        r"rank \d on .*: RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: Killed: mostly because",
        r"the rank was at \S+script\.py, line \d+, in <module>: (train_step\(|next\()",
    ),
    "a step on one rank": (
        "train_step(model, x, y)\nif weft.rank() == 0:\n    train_step(model, x, y)\n",
        r"rank 1 on .* left at step 1 while .*\. Rank 1 has no step 2: is a step under `if weft\.rank\(\) == 0`",
        r"rank 0 stood at \S+script\.py, line \d+, in <module>: train_step\(model, x, y\)",
    ),
    "another step on one rank": (
        "train_step(model, x, y)\nif weft.rank() == 0:\n    evaluate(model, x, y)\ntrain_step(model, x, y)\n",
        r".*input\.step is \"evaluate\" on rank 0 but \"train_step\" on rank 1\. Every rank calls the same steps in "
        r"the same order: is one under `if weft\.rank\(\) == 0`",
        r"at \S+script\.py, line \d+, in <module>: (evaluate|train_step)\(model, x, y\)",
    ),
    "a state on one rank": (
        "train_step(model, x, y)\nif weft.rank() == 0:\n    torch.save(model.state_dict(), 'state.pt')\n",
        r"rank 1 on .* left at step 1 .* state_dict\(\)\. Call state_dict\(\) on every rank, not under `if weft\.rank",
        r"rank 0 stood at \S+script\.py, line \d+, in <module>: torch\.save\(",
    ),
}


@pytest.mark.parametrize("mistake", FAILS)
def test_mistakes_that_end_the_job(mistake: str):
    script, *lines = FAILS[mistake]
    told = run(script).stderr.splitlines()
    for line, expected in zip(told, (f"weft: {lines[0]}", lines[1]), strict=False):
        assert re.match(expected, line), "\n".join(told)


def test_an_error_of_init_is_told_as_that():
    done = run_ranks(3, "import weft.torch as weft\nweft.init(partitions=2)\n", warm=True, timeout=60)
    first, own, *_ = done.stderr.splitlines()
    assert re.match(
        r"weft: rank \d on .* failed in weft\.init: ConfigError: 3 processes cannot be divided into pipelines of 2 "
        r'partitions: start a multiple of 2 processes \(weft run -n 2\), or write "partitions": 1 or 3$',
        first,
    ), done.stderr
    assert re.match(r"at \S+script\.py, line 2, in <module>: weft\.init\(partitions=2\)$", own), done.stderr
