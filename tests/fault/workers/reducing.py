"""Replicas that average their gradients, and one fault at (rank, step) in the middle of the sum of a bucket.

launched   right after the backend has begun to add up (`--all-reduce direct`)
round      between two rounds of a sum in shared memory, where these are made (`--all-reduce shared`)
between    when sums between hosts have begun, or between the two messages of int8 (`--all-reduce hierarchical`; four
           ranks are taken for two hosts)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from training import FAULTS, Plan

import weft.torch as weft
from weft.reduce import choice
from weft.reduce.all_reduce_queue import AllReduceQueue
from weft.reduce.exchange import GroupExchange
from weft.reduce.shared import HostMemory

ROWS, WIDTH = 4, 1024
"""4 MiB a layer: several rounds, and longer under way than it takes to strike."""


def interrupt(plan: Plan) -> None:
    """Let every sum come past the plan."""
    launch, reduce = AllReduceQueue.launch, HostMemory._reduce
    add_up, gather = GroupExchange.all_reduce, GroupExchange.all_gather

    def launched(self: AllReduceQueue, *arguments: Any) -> Any:
        work = launch(self, *arguments)
        plan.reached("launched")
        return work

    def reduced(self: HostMemory, run: Any, round: int) -> None:
        reduce(self, run, round)
        if round == 1:
            plan.reached("round")

    def summed(self: GroupExchange, flat: torch.Tensor) -> Any:
        work = add_up(self, flat)
        plan.reached("between")
        return work

    def gathered(self: GroupExchange, flat: torch.Tensor) -> torch.Tensor:
        plan.reached("between")
        return gather(self, flat)

    AllReduceQueue.launch, HostMemory._reduce = launched, reduced  # type: ignore[method-assign]
    GroupExchange.all_reduce, GroupExchange.all_gather = summed, gathered  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=3)
    parser.add_argument("--phase", default="round")
    parser.add_argument("--all-reduce", default="shared")
    parser.add_argument("--compression", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.all_reduce == "hierarchical":
        choice.hosts_of = lambda group, device=None: ["a", "a", "b", "b"]  # type: ignore[assignment]
    settings = {"partitions": 1, "all_reduce": options.all_reduce, "heartbeat_timeout": 60.0}
    weft.init({**settings, "compression": options.compression})
    plan = Plan(options)
    interrupt(plan)
    model = weft.DistributedModel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), bucket_cap_mb=1
    )

    @weft.step
    def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    for plan.now in range(1, 5):
        model.zero_grad()
        train_step(model, torch.randn(ROWS, WIDTH))
    print("done", flush=True)


if __name__ == "__main__":
    main()
