"""A small training job, split over all its ranks, with one fault at (rank, step, phase).

Rank r owns `blocks.r`. Right before the fault its rank prints `fault at` and the monotonic clock.

    trace      while the first step is traced (rank 0 does that, slowly; the others wait)
    forward    in the forward pass of the rank's own unit
    backward   in the backward pass of that unit
    body       in the step's function, outside of the model
    between    after a step
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft

WIDTH = 16


class InjectedError(Exception):
    """What faults raise."""


def fail() -> None:
    raise InjectedError("injected")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Another thread may take the signal: this one goes no further until the process stands still."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


FAULTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "exception": fail,
    "sigkill": kill,
    "sigstop": stop,
    "sleep": lambda: time.sleep(100),
    "leave": lambda: sys.exit(0),
    "exit3": lambda: os._exit(3),
}


class Plan:
    """When the fault comes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.fault = FAULTS[options.fault]
        self.rank, self.step, self.phase = options.rank, options.step, options.phase
        self.now = 1

    def reached(self, phase: str) -> None:
        if (phase, self.now, weft.rank()) == (self.phase, self.step, self.rank):
            self.phase = "done"
            self.strike()

    def strike(self) -> None:
        print("fault at", time.monotonic(), flush=True)
        self.fault()


class Checked(torch.autograd.Function):
    """The identity, with a fault in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not weft.is_tracing():
            ctx.plan.reached("backward")
        return grad, None


class Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.plan = plan

    def forward(self, x: Tensor) -> Tensor:
        if weft.is_tracing():
            time.sleep(0.2)
        self.plan.reached("trace" if weft.is_tracing() else "forward")
        return Checked.apply(torch.tanh(self.inner(x)), self.plan)


class Net(nn.Module):
    def __init__(self, plan: Plan, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(plan) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--phase", default="forward")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--wait-timeout", type=float, default=60)
    parser.add_argument("--other-model", action="store_true", help="rank 1 has one layer of another size")
    parser.add_argument(
        "--other-input", type=int, default=0, help="from this step on rank 1 has other inputs"
    )
    parser.add_argument("--other-code", action="store_true", help="rank 1 computes with another shape")
    parser.add_argument(
        "--shared", action="store_true", help="microbatches share a tensor that weft cannot see"
    )
    parser.add_argument("--other-setting", action="store_true", help="rank 1 has other settings")
    return parser.parse_args()


def main() -> None:
    options = options_of()
    torch.set_num_threads(1)
    ranks, me = (int(os.environ.get(name, os.environ.get(other, "0"))) for name, other in (
        ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"), ("RANK", "OMPI_COMM_WORLD_RANK")
    ))  # fmt: skip
    other = me == 1
    partitions = ranks // options.replicas
    weft.init(
        {
            "partitions": partitions,
            "microbatches": 2 if options.other_setting and other else 4,
            "auto_partition": False,
            "heartbeat_timeout": 4.0 if options.fault == "sigstop" else 60.0,
            "wait_timeout": options.wait_timeout,
            "verify": "off" if options.shared else "losses",
        }
    )
    torch.manual_seed(0)
    sys.modules["shared_by_microbatches"] = types.ModuleType("shared_by_microbatches")
    sys.modules["shared_by_microbatches"].tensors = {}
    plan = Plan(options)
    net = Net(plan, partitions)
    if options.other_model and other:
        net.blocks[1].extra = nn.Linear(3, 3)
    for index, block in enumerate(net.blocks):
        weft.set_partition(block, index)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @weft.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if not weft.is_tracing():
            plan.reached("body")
        x = model(x)
        if options.shared:
            place = __import__("shared_by_microbatches").tensors  # by no name that leads there before it runs
            place["x"] = x
            x = model.module.blocks[0](x) + place["x"]
        if options.other_code and plan.now == 2:
            x = x.view(1, -1, WIDTH)[0] if other else x.tanh()
        loss = F.mse_loss(x, y)
        model.backward(loss)
        return loss

    if options.phase == "trace" and options.rank == me != 0:
        threading.Timer(0.3, plan.strike).start()
    for number in range(1, options.steps + 1):
        plan.now = number
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        if other and 0 < options.other_input <= number:
            x, y = (torch.cat([t, t]) for t in (x, y))
        optimizer.zero_grad()
        loss = train_step(model, x, y).reduce_mean()
        optimizer.step()
        plan.reached("between")
        if me == 0:
            print(f"step {number} loss {loss.item():.4f}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
