"""A running average in a module that was split by hand: each microbatch saw the averages of later ones.

    self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)      microbatch 0, then it waits for another rank ...
    self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)      ... and microbatch 1 has its turn
    return self.block(x - self.average)                    microbatch 0 again, with both averages

The numbers were wrong and nobody said so; a buffer that was replaced instead of written made the ranks wait for each
other. Both are refused now, with what to do. Modules that are not split are not concerned.
"""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

SCRIPT = """
import torch, weft.torch as weft
from torch import nn

torch.manual_seed(0)
weft.init({"partitions": 2, "microbatches": 2, "auto_partition": False})


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        WRITE
        return self.down(self.up(x) - self.average)


net = nn.Sequential(Averaging(), nn.Linear(8, 8))
model = weft.DistributedModel(net)
weft.set_partition(net[0].up, 1)


@weft.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


train_step(model, torch.randn(4, 8))
"""


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (
            "self.average.mul_(0.9).add_(self.up(x).detach().mean(0), alpha=0.1)",
            "move the buffer and what writes it",
        ),
        ("self.average = self.average * 0.9 + self.up(x).detach().mean(0)", "replaces its buffer 0.average"),
    ],
)
def test_a_split_module_may_not_write_its_buffers_from_activations(write: str, text: str) -> None:
    done = run_ranks(2, SCRIPT.replace("WRITE", write), timeout=60, warm=True)
    assert done.returncode != 0
    assert text in done.stderr
