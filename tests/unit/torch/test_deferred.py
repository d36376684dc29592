"""The backward pass in two halves gives the gradients of the whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.errors import UsageError
from weft.torch.deferred import DeferWeights, Task, collecting, paused
from weft.torch.intercept import install


class Applied(nn.Module):
    """A parameter or two, used by a function."""

    def __init__(self, use: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.use = use
        torch.manual_seed(1)
        self.own = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, *self.own)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


IDS = torch.tensor([[1, 5, 0], [3, 5, 9]])
DEFERRED = {
    "linear": (F.linear, numbers(2, 3, 4), (5, 4), (5,)),
    "linear without bias": (F.linear, numbers(3, 4), (5, 4)),
    "matmul": (torch.matmul, numbers(2, 3, 4), (4, 5)),
    "operator": (lambda x, w: x @ w, numbers(3, 4), (4, 5)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), numbers(3, 4), (4, 5), (5,)),
    "embedding": (lambda x, w: F.embedding(IDS, w), numbers(1), (10, 4)),
    "embedding with padding": (lambda x, w: F.embedding(IDS, w, -5), numbers(1), (10, 4)),
    "embedding by count": (lambda x, w: F.embedding(IDS, w, scale_grad_by_freq=True), numbers(1), (10, 4)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), numbers(2, 4, 9), (6, 4, 3), (6,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, (1, 2), 1, 2, 2), numbers(2, 4, 9, 8), (6, 2, 3, 3), (6,)),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), numbers(1, 2, 4, 4, 4), (3, 2, 3, 3, 3)),
}
WHOLE = {
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w), numbers(3, 4), (4,)),
    "max norm": (lambda x, w: F.embedding(IDS, w, max_norm=1.0), numbers(1), (10, 4)),
    "padding by word": (lambda x, w: F.conv1d(x, w, padding="same"), numbers(2, 4, 9), (6, 4, 3)),
    "a weight that is computed": (lambda x, w: F.linear(x, w * 2), numbers(3, 4), (5, 4)),
    "a vector": (lambda x, w: torch.matmul(x, w), numbers(4), (4, 5)),
}


def backward(net: nn.Module, x: Tensor, repeat: int = 2) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of the parameters and of `x`, from so many calls."""
    x = x.clone().requires_grad_()
    for _ in range(repeat):
        net(x * 1.5).square().sum().backward()
    return [p.grad for p in net.parameters()], x.grad


def in_halves(net: nn.Module, x: Tensor, repeat: int = 2) -> tuple[list[Tensor | None], Tensor | None, int]:
    """The same, W after all I; and how many tasks were left."""
    x = x.clone().requires_grad_()
    tasks: list[Task] = []
    for _ in range(repeat):
        with DeferWeights():
            loss = net(x * 1.5).square().sum()
        with collecting(tasks):
            loss.backward()
    for task in tasks:
        task()
    return [p.grad for p in net.parameters()], x.grad, len(tasks)


@pytest.mark.parametrize("needed", [True, False], ids=["input needs a gradient", "input needs none"])
@pytest.mark.parametrize("name", [*DEFERRED, *WHOLE])
def test_the_halves_give_the_whole(name: str, needed: bool):
    use, x, *shapes = {**DEFERRED, **WHOLE}[name]
    net = Applied(use if needed else (lambda x, *own: use(x.detach(), *own)), *shapes)
    other = copy.deepcopy(net)
    expected, of_x = backward(net, x)
    found, also_of_x, tasks = in_halves(other, x)
    assert tasks == (2 if name in DEFERRED else 0)
    for one, wanted in zip((*found, also_of_x), (*expected, of_x), strict=True):
        torch.testing.assert_close(one, wanted)


def test_frozen_parameters_stay_without_a_gradient():
    net = nn.Linear(4, 5)
    net.weight.requires_grad = False
    found, _, tasks = in_halves(net, numbers(3, 4))
    assert found[0] is None and found[1] is not None and tasks == 2


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_see_their_gradient(hook: str):
    net = nn.Linear(4, 5)
    heard: list[Tensor] = []
    getattr(net.weight, hook)(heard.append)
    assert in_halves(net, numbers(3, 4), 1)[2] == 0 and len(heard) == 1


def test_under_autocast_all_is_whole():
    net = nn.Linear(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert in_halves(net, numbers(3, 4))[2] == 0


def test_in_checkpoints_all_is_whole():
    install()
    net = nn.Linear(4, 5)
    expected, of_x = backward(copy.deepcopy(net), numbers(3, 4))
    used = Applied(lambda x: checkpoint(net, x, use_reentrant=False))
    _, also_of_x, tasks = in_halves(used, numbers(3, 4))
    assert tasks == 0
    torch.testing.assert_close((net.weight.grad, net.bias.grad, also_of_x), (*expected, of_x))
    with paused():
        assert in_halves(copy.deepcopy(net), numbers(3, 4))[2] == 0


def test_gradients_inside_of_forward_are_refused_with_the_remedy():
    net = nn.Linear(4, 5)
    x = numbers(3, 4).requires_grad_()
    with (
        DeferWeights(),
        pytest.raises(UsageError, match='choose another one, for example {"pipeline": "inter'),
    ):
        torch.autograd.grad(net(x).sum(), x)
