"""Activation checkpoints that the script asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.torch.networks import Chain
from weft.torch.activation_checkpointing import set_activation_checkpointing


@pytest.mark.parametrize(
    "container", [nn.ModuleList, lambda blocks: nn.ModuleDict({"a": blocks[0], "b": blocks[1]})]
)
def test_modules_in_a_container_that_is_never_called_are_checkpointed(container: Any):
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = container([Chain(1), Chain(1)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks.children():
                x = block(x)
            return x

    torch.manual_seed(0)
    net, calls = Held(), []
    for each in net.blocks.children():
        linear = next(part for part in each.modules() if isinstance(part, nn.Linear))
        linear.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(4, 8)
    net(x).square().mean().backward()
    plain = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    assert len(calls) == 2
    set_activation_checkpointing(net.blocks, pack_args_as_tuple=True, strategy="each")
    net(x).square().mean().backward()
    assert len(calls) == 2 + 4, "each ran twice"
    torch.testing.assert_close([parameter.grad for parameter in net.parameters()], plain, rtol=0, atol=0)
