"""One rank of a job that a plan is compared with: it trains some steps and writes what they took.

    python -m weft run -n N --set ... -m benchmarks.plan.trainee TASK FOLDER

Memory is the peak of resident memory (VmHWM) of the steps that count, above what was resident before the model was
built. Steps begin at a barrier.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import weft.torch as weft
from benchmarks import machine
from benchmarks.balance.models import MODELS, Inputs, arguments, loss
from benchmarks.gpt import GPT
from benchmarks.plan.runs import BATCH, Task, gpt_config
from benchmarks.turns.rank import _touch_library_pages
from weft.plan.parallelism.traced import block_of
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.example_graph import Example, traced_graph

WARM_UP = 12
"""Memory is joined to huge pages before steps 1, 2, 4 and 8, for up to 0.25 s each and in steps after them."""


def network_of(task: Task) -> nn.Module:
    if task.model == "gpt":
        torch.manual_seed(0)
        return GPT(gpt_config(task.small, task.blocks))
    network = MODELS[task.model].build(task.small)
    for module in network.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # a cache of keys is for generating, and forbids checkpoints
    return network


def inputs_of(task: Task) -> Inputs:
    """The whole mini-batch, or this replica's part of it."""
    if task.model == "gpt":
        config = gpt_config(task.small)
        ids = torch.randint(
            config.vocabulary, (BATCH, config.context + 1), generator=torch.Generator().manual_seed(0)
        )
        whole = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    else:
        whole = MODELS[task.model].inputs(task.small)
    return {name: tensor.chunk(task.replicas)[0].contiguous() for name, tensor in whole.items()}


def recompute(network: nn.Module) -> None:
    """Checkpoint every block, as `weft plan` reckons: the modules that the first number of their names tells apart."""
    for name, module in network.named_modules():
        if name and block_of(f"{name}.inside") == name:
            set_activation_checkpointing(module)


def trace(task: Task, out: Path) -> None:
    """Each rank by itself, all at once."""
    example = Example(network_of(task), arguments(inputs_of(task)), _loss)
    out.write_text(traced_graph(example, microbatches=task.microbatches).to_json())


def _loss(found: Any, inputs: Inputs) -> Tensor:
    """The loss; of the plain GPT that of tokens which stand for its labels."""
    return loss(found, inputs | {"labels": inputs["ids"]} if isinstance(found, Tensor) else inputs)


def _touch_checkpoint_code() -> None:
    """Run a checkpoint: code of libraries that it needs, and an optimizer (``torch._dynamo``), is nobody's memory."""
    x = torch.ones(1, 8, requires_grad=True)
    torch_checkpoint(nn.Linear(8, 8), x, use_reentrant=False).sum().backward()


def train(task: Task, out: Path) -> None:
    weft.init()
    _touch_library_pages()
    network_of(replace(task, small=True))  # what it imports is nobody's memory
    _touch_checkpoint_code()
    inputs = inputs_of(task)
    machine.reset_peak_rss()
    base = machine.rss_bytes()
    network = network_of(task)
    if task.recompute:
        recompute(network)
    model = weft.DistributedModel(network)
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4))

    @weft.step
    def train_step(model: nn.Module, inputs: Inputs) -> Tensor:
        found = loss(model(**arguments(inputs)), inputs)
        model.backward(found)
        return found

    times, own, busy = [], [], []
    for step in range(WARM_UP + task.steps):
        if step == WARM_UP:
            machine.reset_peak_rss()
        weft.barrier()
        begin, own_s, busy_s = time.monotonic(), time.process_time(), machine.busy_s()
        optimizer.zero_grad()
        train_step(model, inputs)
        optimizer.step()
        times.append(time.monotonic() - begin)
        own.append(time.process_time() - own_s)
        busy.append(machine.busy_s() - busy_s)
    held = [parameter for _, parameter in model.local_named_parameters()]
    found = {
        "steps_s": times[WARM_UP:],
        "own_s": own[WARM_UP:],
        "busy_s": busy[WARM_UP:],
        "memory_bytes": machine.peak_rss_bytes() - base,
        "parameter_bytes": sum(one.numel() * one.element_size() for one in held),
    }
    out.write_text(json.dumps(found))
    weft.shutdown()


def main(text: str, folder: str) -> None:
    torch.set_num_threads(1)
    task, out = Task.from_text(text), Path(folder, f"rank{os.environ['RANK']}.json")
    (trace if task.trace else train)(task, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
