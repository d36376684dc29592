"""Weights in host memory beside an emulated GPU: losses and states are those of weights on the device.

weights.py PARTITIONS
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch

import weft.torch as weft
from tests import models
from tests.training import squares, step_of

WIDTH = 128


def trained(late: bool, **settings: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses of some steps and the whole state, with saves, loads and a write of the script's own between them."""
    weft.init({"partitions": int(sys.argv[1]), "microbatches": 2, **settings})
    torch.manual_seed(0)
    with weft.delay_param_initialization(late):
        net = models.Chain(6, lambda: models.Block(WIDTH))
        net.blocks[:3].requires_grad_(False)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    step, losses = step_of(squares), []
    folder = weft.allgather(tempfile.mkdtemp())[0]
    for number in range(5):
        optimizer.zero_grad()
        losses.append(float(step(model, torch.ones(4, WIDTH)).reduce_mean()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number == 1:
            with torch.no_grad():
                for parameter in model.local_parameters():
                    parameter.add_(1e-3)
            torch.optim.SGD(model.parameters(), lr=0.01).step()
        if number == 2:
            optimizer.load_state_dict(optimizer.state_dict())
            model.load_state_dict(model.state_dict())
            weft.save_checkpoint(folder, "now", model=model, optimizer=optimizer)
        if number == 3:
            weft.resume_from_checkpoint(folder, "now", model=model, optimizer=optimizer)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    if model.host_weights is not None:
        weights = [weight.parameter for weight in model.host_weights.by_layer.weights]
        assert weights and all(each.device.type == "cpu" for each in weights)
    weft.shutdown()
    return losses, state


def main() -> None:
    for late in (False, True):
        expected = trained(late)
        for more in ({}, {"offload_optimizer": True, "offload_activations": True}, {"memory_limit": 0.001}):
            found = trained(late, offload_weights=True, **more)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    print("weights: passed", flush=True)


if __name__ == "__main__":
    main()
