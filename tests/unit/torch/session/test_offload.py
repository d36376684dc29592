"""Offloading: what checkpoints keep goes through the hooks that move it, and comes back for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.unit.torch.networks import Chain
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.session import offload

Init = Callable[..., None]


class Counted(torch.autograd.graph.saved_tensors_hooks):
    """In place of `save_on_cpu`: copies, counted on the way out and back."""

    out: list[tuple[int, ...]] = []
    back: list[tuple[int, ...]] = []
    pinned: list[bool] = []

    def __init__(self, pin_memory: bool) -> None:
        self.pinned.append(pin_memory)
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.numel():  # PyTorch 2.11 keeps an empty one for each checkpoint
            self.out.append(tuple(tensor.shape))
        return tensor.clone()

    def unpack(self, packed: Tensor) -> Tensor:
        if packed.numel():
            self.back.append(tuple(packed.shape))
        return packed


@pytest.mark.parametrize("hooks", [Counted, None], ids=["counted", "real"])
def test_what_checkpoints_keep_is_offloaded(hooks: Any, init: Init, monkeypatch: pytest.MonkeyPatch):
    if hooks is not None:
        monkeypatch.setattr(offload, "save_on_cpu", hooks)
    found = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for settings in ({}, {"offload_activations": True}):
        init(microbatches=2, **settings)
        torch.manual_seed(0)
        net = nn.Sequential(Chain(2), Chain(2), nn.Linear(8, 8))
        set_activation_checkpointing(net[0])
        set_activation_checkpointing(net[1])
        model = weft.DistributedModel(net)
        for kept in (Counted.out, Counted.back, Counted.pinned):
            kept.clear()

        @weft.step
        def step(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        loss = step(model, x).reduce_mean()
        found.append([loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
        with torch.no_grad():
            model(x)
        if hooks is not None:  # the input of each checkpoint, for each of two microbatches, and nothing else
            inputs = [(2, 8)] * 4 if settings else []
            assert (Counted.out, Counted.back) == (inputs, inputs) and not any(Counted.pinned)
    assert len(found[0]) == len(found[1]) > 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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
