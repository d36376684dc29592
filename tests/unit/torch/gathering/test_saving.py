"""What autograd keeps of weights and of other tensors, see `weft.torch.gathering.saving`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.torch.backward.weight_gradients import take_weights
from weft.torch.gathering.saving import Saving, View
from weft.torch.pytorch.private import storage_key


class Weights:
    """Weights that come when autograd asks for them; in between there are none."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.asked: list[int] = []
        self.saving = Saving(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> View | None:
        keys = [storage_key(parameter) for parameter in self.parameters]
        if storage_key(tensor) not in keys:
            return None
        number = keys.index(storage_key(tensor))
        return View(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, view: View) -> Tensor:
        self.asked.append(view.of)
        return self.values[view.of].as_strided(view.size, view.stride, view.offset)

    def give_back(self) -> None:
        for parameter in self.parameters:
            parameter.data = torch.full_like(parameter, torch.nan)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def expected() -> list[Tensor]:
    net = network()
    net(X).square().sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_no_weight_is_kept():
    net = network()
    weights = Weights(net)
    with weights.saving.inside(), weights.saving.inside():
        loss = net(X).square().sum()
    weights.give_back()
    loss.backward()
    assert sorted(weights.asked) == [2, 3, 4]  # of the first layer nobody wants the gradient of its input
    for found, wanted in zip(net.parameters(), expected(), strict=True):
        assert torch.equal(found.grad, wanted)


def test_a_checkpoint_around_it_still_computes_again():
    net = network()
    weights = Weights(net)
    calls = []

    def run(x: Tensor) -> Tensor:
        calls.append(1)
        with weights.saving.inside():
            return net(x)

    checkpoint(run, X, use_reentrant=False).square().sum().backward()
    assert len(calls) == 2
    for found, wanted in zip(net.parameters(), expected(), strict=True):
        assert torch.equal(found.grad, wanted)


def test_gradients_of_weights_can_come_later():
    net = network()
    weights = Weights(net)
    with weights.saving.inside():
        loss = net(X).square().sum()
    tasks: list = []
    reached = take_weights([loss], tasks.append)
    assert len(reached) > 0
    loss.backward(inputs=reached)
    assert [id(task.parameter) for task in tasks] == [id(net[3].weight), id(net[0].weight)]


def test_what_was_written_since_is_an_error():
    weights = Weights(network())
    x = X.clone().requires_grad_()
    with weights.saving.inside():
        y = (x * 1).exp()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_keeps_itself():
    weights = Weights(network())
    with weights.saving.inside():
        y = X.clone().requires_grad_().exp()
    node = y.grad_fn
    assert node._raw_saved_result.data.tensor.grad_fn is None
