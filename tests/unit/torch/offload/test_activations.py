"""Activations outside of the device: the same gradients, copied once, and errors where autograd has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.training import squares, step_of
from tests.unit.torch.networks import Chain
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.offload import activations as module
from weft.torch.offload.activations import Activations

CPU = torch.device("cpu")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of what was copied out."""
    monkeypatch.setattr(module, "LEAST_BYTES", 1)
    found: list[int] = []
    real = module._Storage.__init__

    def noted(self: Any, owner: Any, group: Any, tensor: Tensor) -> None:
        real(self, owner, group, tensor)
        found.append(self.nbytes)

    monkeypatch.setattr(module._Storage, "__init__", noted)
    return found


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


def test_gradients_are_the_same_and_each_storage_is_copied_once(copied: list[int]):
    net, x = nn.Linear(10, 24), torch.randn(4, 10)
    activations = Activations(CPU)
    activations.begin([net])

    def loss() -> Tensor:
        h = net(x)
        q, k, v = h.chunk(3, -1)  # three tensors in one storage
        return (torch.softmax(q @ k.t(), -1) @ v).square().sum() + (h * h).sum()

    expected = gradients(net, loss())
    with activations.all():
        found = gradients(net, loss())
    assert all(map(torch.equal, expected, found))
    x_bytes, h_bytes = 4 * 10 * 4, 4 * 24 * 4
    assert copied.count(x_bytes) == 1 and copied.count(h_bytes) == 1 and 10 * 24 * 4 not in copied


def test_what_is_written_between_two_uses_is_copied_again(copied: list[int]):
    w = nn.Parameter(torch.randn(6))
    activations = Activations(CPU)
    activations.begin([])

    def loss() -> Tensor:
        x = torch.ones(6)
        first = w * x
        with torch.no_grad():
            x.add_(1)
        return first.sum() + (w * x).sum()

    with activations.all():
        value = loss()
    (grad,) = torch.autograd.grad(value, [w])
    assert grad.tolist() == [3.0] * 6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss().backward()  # without offloading autograd cannot know what it was


def test_small_tensors_that_stay_are_guarded_as_ever():
    w, activations = nn.Parameter(torch.randn(6)), Activations(CPU)
    activations.begin([])
    with activations.all():
        x = torch.ones(6)
        loss = (w * x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_that_is_kept_goes_back_twice(copied: list[int]):
    net, x = Chain(2), torch.randn(4, 8)
    activations = Activations(CPU)
    activations.begin([net])
    with activations.all():
        loss = net(x).square().mean()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(net.parameters()))
    assert all(map(torch.equal, first, second)) and copied
    del loss, first, second


def test_memory_is_used_again_and_sizes_of_old_shapes_are_forgotten(copied: list[int]):
    net = Chain(2)
    activations = Activations(CPU)
    free = activations.memory._free
    for rows in (4, 4, 6, 6):
        activations.begin([net])
        before = {storage.data_ptr() for kept in free.values() for storage in kept}
        with activations.all():
            gradients(net, net(torch.randn(rows, 8)).square().mean())
        after = {storage.data_ptr() for kept in free.values() for storage in kept}
        assert after and (rows == 6 or not before or before == after)
    activations.begin([net])
    assert {4 * 8 * 4, 4 * 16 * 4}.isdisjoint(free)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_steps_of_one_process(checkpoints: bool, init: Callable[..., None], copied: list[int]):
    found = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for settings in ({}, {"offload": {"activations": True}}):
        init(microbatches=2, **settings)
        torch.manual_seed(0)
        net = nn.Sequential(Chain(2), Chain(2), nn.Linear(8, 8))
        for part in net[:2] if checkpoints else ():
            set_activation_checkpointing(part)
        model = weft.DistributedModel(net)
        step = step_of(squares)
        loss = step(model, x).reduce_mean()
        found.append([loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
        assert bool(copied) == bool(settings)
    assert len(found[0]) == len(found[1]) > 4
    assert all(map(torch.equal, *found))
