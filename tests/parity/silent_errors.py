"""Faults that are silent elsewhere, and of which no other check asks by itself; started by `test_silent_errors.py`.

    silent_errors.py check...       for tests/README.md

Every rank asserts for itself.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.parity.between_steps import Alone, Split, adam, batches, layouts
from tests.parity.registry import Checks
from tests.training import squares, step_of

CHECKS = Checks()
WIDTH = 8


@CHECKS.check
def gradients_do_not_grow_with_the_microbatches() -> None:
    """SGD shows the size of gradients, which AdamW hides."""

    def descent(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    for layout, settings in layouts():
        for number in (1, 2, 4):
            alone, job = Alone(descent), Split({**settings, "microbatches": number}, descent)
            for x in batches()[:2]:
                alone.step(x)
                job.step(x)
            job.compare(alone, f"{number} microbatches in {layout}")
            weft.shutdown()


@CHECKS.check
def a_rate_that_follows_a_schedule_is_stepped_once() -> None:
    """Each rank has a scheduler, and none counts the microbatches or the ranks."""
    for layout, settings in layouts():
        alone, job = Alone(adam), Split(settings, adam)
        schedules = [torch.optim.lr_scheduler.StepLR(each.optimizers[0], 1, 0.5) for each in (alone, job)]
        for x in batches()[:3]:
            for each, schedule in zip((alone, job), schedules, strict=True):
                each.step(x)
                schedule.step()
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr(), layout
        job.compare(alone, layout)


class Noting(nn.Module):
    """A running mean of its own, as layers of quantisation keep one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.layer(x) - self.mean


@CHECKS.check
def buffers_of_replicas_do_not_drift_apart() -> None:
    weft.init({"microbatches": 1, "ddp": True})
    model = weft.DistributedModel(Noting())
    train = step_of(squares)
    expected = torch.zeros(WIDTH)
    for step in range(3):
        numbers = torch.Generator().manual_seed(step)
        parts = torch.randn(weft.size(), 4, WIDTH, generator=numbers)
        train(model, parts[weft.rank()])
        expected.lerp_(parts[0].mean(0), 0.5)  # the first replica's, as in PyTorch's DDP
    torch.testing.assert_close(model.state_dict()["mean"], expected)
    weft.shutdown()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
