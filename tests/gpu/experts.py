"""Replicas on a GPU that share experts, beside one process on the CPU; started by `test_emulated.py`."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.parity.expert_parallel import ByExpert, ToAll
from tests.parity.experts import Layer
from tests.parity.tensor_parallel_models import WIDTH, Mixture, Routed, Shared, Stacked


def main() -> None:
    weft.init({"microbatches": 2, "expert_parallel_degree": 2})
    torch.manual_seed(0)
    mixtures = [Routed(Stacked(experts=3), 3), Mixture(), Shared(), ByExpert(), ToAll()]
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(Layer, mixtures))
    alone = copy.deepcopy(net)
    model = weft.DistributedModel(net)
    device = next(model.parameters()).device
    assert device.type == "cuda"
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-5))
    plain = torch.optim.AdamW(alone.parameters(), lr=0.003, eps=1e-5)

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
    print("experts: passed", flush=True)


if __name__ == "__main__":
    main()
