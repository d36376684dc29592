"""Layouts of ranks on GPUs beside one process on the CPU; started by `test_emulated.py`.

layouts.py experts | whole_updates
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.parity.expert_parallel import ByExpert, ToAll
from tests.parity.experts import Layer
from tests.parity.tensor_parallel_models import WIDTH, Gated, Mixture, Routed, Shared, Stacked


def experts() -> list[nn.Module]:
    weft.init({"microbatches": 2, "expert_parallel_degree": 2})
    torch.manual_seed(0)
    return [Routed(Stacked(experts=3), 3), Mixture(), Shared(), ByExpert(), ToAll()]


def whole_updates() -> list[nn.Module]:
    """For an optimizer that looks at whole weights, of which ranks have parts."""
    weft.init({"microbatches": 2, "tensor_parallel_degree": 2})
    torch.manual_seed(0)
    return [Gated(), Gated(), Routed(Stacked())]


def optimizer_of(parameters: Any, whole: bool) -> torch.optim.Optimizer:
    kind = torch.optim.Adafactor if whole else torch.optim.AdamW
    return kind(parameters, lr=0.003, **({} if whole else {"eps": 1e-5}))


def main(name: str) -> None:
    layers = globals()[name]()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(Layer, layers))
    alone = copy.deepcopy(net)
    model, whole = weft.DistributedModel(net), name == "whole_updates"
    device = next(model.parameters()).device
    assert device.type == "cuda"
    optimizer = weft.DistributedOptimizer(optimizer_of(model.parameters(), whole))
    plain = optimizer_of(alone.parameters(), whole)

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = (model(x) - x.roll(1, 1)).square().mean()
        model.backward(loss)
        return loss

    for number in range(2):
        x = torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        plain.zero_grad()
        step(model, x.chunk(weft.rdp_size())[weft.rdp_rank()].to(device))
        (alone(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
        plain.step()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(state, dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
    print(f"{name}: passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
