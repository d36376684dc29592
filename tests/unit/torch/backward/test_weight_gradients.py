"""The backward pass in two halves gives the gradients of the whole one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from weft.torch.backward.autograd import run_autograd
from weft.torch.backward.weight_gradients import Task, run_all, take_weights
from weft.torch.execution.unit_call import attach
from weft.torch.session.pipeline import Pipeline


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
    "embedding with a largest norm": (lambda x, w: F.embedding(IDS, w, max_norm=1.0), numbers(1), (10, 4)),
    "conv1d with padding by word": (lambda x, w: F.conv1d(x, w, padding="same"), numbers(2, 4, 9), (6, 4, 3)),
    "a vector": (torch.matmul, numbers(4), (4, 5)),
}
WHOLE = {
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w), numbers(3, 4), (4,)),
    "sparse embedding": (lambda x, w: F.embedding(IDS, w, sparse=True), numbers(1), (10, 4)),
    "a permuted weight": (lambda x, w: x @ w.T, numbers(3, 4), (5, 4)),
    "a weight on the left": (lambda x, w: torch.matmul(w, x), numbers(4, 3), (5, 4)),
    "a weight that is computed": (lambda x, w: F.linear(x, w * 2), numbers(3, 4), (5, 4)),
}


def backward(net: nn.Module, x: Tensor, repeat: int = 2) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of the parameters and of `x`, from so many calls."""
    x = x.clone().requires_grad_()
    for _ in range(repeat):
        net(x * 1.5).square().sum().backward()
    return [p.grad for p in net.parameters()], x.grad


def in_halves(net: nn.Module, x: Tensor, repeat: int = 2) -> tuple[list[Tensor | None], Tensor | None, int]:
    """The same, W after all I; and how many tasks were left."""
    tasks: list[Task] = []
    _, of_x = apart(net, x, repeat, tasks.append)
    run_all(tasks[:1])
    run_all(tasks[1:])  # adds to a gradient that is there
    return [p.grad for p in net.parameters()], of_x, len(tasks)


def apart(
    net: nn.Module, x: Tensor, repeat: int, then: Callable[[Task], None], at_once: bool = False
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of the parameters and of `x`, whose weights' gradients `then` is given."""
    x = x.clone().requires_grad_()
    for _ in range(repeat):
        loss = net(x * 1.5).square().sum()
        run_autograd([loss], [torch.ones_like(loss)], take_weights([loss], then, at_once))
    return [p.grad for p in net.parameters()], x.grad


def same_in_halves(net: nn.Module, x: Tensor) -> int:
    """The halves give the whole, and left so many tasks in two calls."""
    other = copy.deepcopy(net)
    expected, of_x = backward(net, x)
    found, also_of_x, tasks = in_halves(other, x)
    torch.testing.assert_close((*found, also_of_x), (*expected, of_x))
    return tasks


@pytest.mark.parametrize("needed", [True, False], ids=["input needs a gradient", "input needs none"])
@pytest.mark.parametrize("name", [*DEFERRED, *WHOLE])
def test_the_halves_give_the_whole(name: str, needed: bool):
    use, x, *shapes = {**DEFERRED, **WHOLE}[name]
    net = Applied(use if needed else (lambda x, *own: use(x.detach(), *own)), *shapes)
    assert same_in_halves(net, x) == (2 if name in DEFERRED else 0)


@pytest.mark.parametrize("name", [*DEFERRED, *WHOLE])
def test_weights_that_are_added_at_once_give_the_whole(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft.torch.backward.weight_gradients.FUSED_BYTES", 0)
    use, x, *shapes = {**DEFERRED, **WHOLE}[name]
    net = Applied(use, *shapes)
    other = copy.deepcopy(net)
    expected, of_x = backward(net, x, 3)
    ran: list[Task] = []

    def at_once(task: Task) -> None:
        ran.append(task)
        task.at_once()

    found, also_of_x = apart(other, x, 3, at_once, at_once=True)
    assert len(ran) == (3 if name in DEFERRED and not name.startswith("conv") else 0)
    assert all(task.grad is task.kept is task.node is None for task in ran), (
        "what it was made of is free again"
    )
    torch.testing.assert_close((*found, also_of_x), (*expected, of_x))


def test_small_weights_are_left_to_autograd():
    net = nn.Linear(4, 5)
    loss = net(numbers(3, 4)).sum()
    assert take_weights([loss], Task.at_once, at_once=True) == ()


def test_frozen_parameters_stay_without_a_gradient():
    net = nn.Linear(4, 5)
    net.weight.requires_grad = False
    found, _, tasks = in_halves(net, numbers(3, 4))
    assert found[0] is None and found[1] is not None and tasks == 0
    net.bias.requires_grad = False
    net.weight.requires_grad = True
    net.zero_grad()
    found, _, tasks = in_halves(net, numbers(3, 4))
    assert found[0] is not None and found[1] is None and tasks == 2


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_see_their_gradient(hook: str):
    net = nn.Linear(4, 5)
    heard: list[Tensor] = []
    getattr(net.weight, hook)(heard.append)
    assert in_halves(net, numbers(3, 4), 1)[2] == 0 and len(heard) == 1


def twice(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w), w)


def tied(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.embedding(IDS, w), w) + x.sum()


def mixed(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) + w.sum()


@pytest.mark.parametrize(("use", "uses"), [(twice, 2), (tied, 2), (mixed, 0)], ids=["twice", "tied", "mixed"])
def test_weights_that_are_used_several_times(use: Callable[..., Tensor], uses: int):
    """Where autograd has to visit a weight for one of its uses, it does for all."""
    assert same_in_halves(Applied(use, (10, 10)).double(), numbers(3, 10).double()) == 2 * uses


def test_hooks_of_results_change_what_comes_after_them():
    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda grad: grad * 3)
            return y

    assert same_in_halves(Hooked(4, 5), numbers(3, 4)) == 2


def test_a_factor_of_the_product_counts():
    net = Applied(lambda x, w, b: torch.addmm(b, x, w, alpha=3.0, beta=0.5), (4, 5), (5,))
    assert same_in_halves(net, numbers(3, 4)) == 2


def test_complex_weights_are_left_to_autograd():
    w = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
    loss = (numbers(3, 4).to(torch.complex64) @ w).abs().sum()
    assert take_weights([loss], Task.__call__) == ()


def test_under_autocast_all_is_whole():
    net = nn.Linear(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert in_halves(net, numbers(3, 4))[2] == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_checkpoints_all_is_whole(reentrant: bool):
    net = nn.Linear(4, 5)
    expected, of_x = backward(copy.deepcopy(net), numbers(3, 4))
    used = Applied(lambda x: checkpoint(net, x, use_reentrant=reentrant))
    _, also_of_x, tasks = in_halves(used, numbers(3, 4))
    assert tasks == 0
    torch.testing.assert_close((net.weight.grad, net.bias.grad, also_of_x), (*expected, of_x))


class BesideACheckpoint(nn.Module):
    """A layer, and one in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.outer(x), use_reentrant=True)


def test_beside_a_reentrant_checkpoint_all_is_whole():
    assert same_in_halves(BesideACheckpoint(), numbers(3, 4)) == 0


def test_gradients_inside_of_forward_are_as_ever():
    class Penalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).tanh()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + slope.square().sum()

    same_in_halves(Penalised(4, 5), numbers(3, 4))


@pytest.mark.parametrize("at_once", [True, False])
def test_memory_is_free_without_a_search_for_cycles(at_once: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft.torch.backward.weight_gradients.FUSED_BYTES", 0)
    net = nn.Linear(4, 5)
    x = numbers(3, 4).requires_grad_()
    tasks: list[Task] = []
    kept: list[weakref.ref[Tensor]] = []

    def then(task: Task) -> None:
        kept.extend([weakref.ref(task.grad), weakref.ref(task.kept[0])])
        task.at_once() if at_once else tasks.append(task)

    gc.collect()
    gc.disable()
    try:
        loss = net(x * 1.5).square().sum()
        run_autograd([loss], [torch.ones_like(loss)], take_weights([loss], then, at_once))
        assert [reference() is None for reference in kept] == [at_once] * 2
        del loss
        tasks.clear()
        assert [reference() is None for reference in kept] == [True] * 2
    finally:
        gc.enable()


def test_a_list_of_tasks_is_no_cycle():
    net = nn.Linear(4, 5)

    class Tasks(list[Task]):
        """A list that may be watched."""

    gc.collect()
    gc.disable()
    try:
        tasks = Tasks()
        loss = net(numbers(3, 4).requires_grad_()).sum()
        run_autograd([loss], [torch.ones_like(loss)], take_weights([loss], tasks.append))
        assert len(tasks) == 1
        watched = weakref.ref(tasks)
        del tasks
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("owner", "width", "fuses"), [(0, 512, True), (1, 512, False), (0, 8, False)])
def test_a_rank_with_a_large_weight_adds_at_once_also_if_it_has_no_memory_yet(
    owner: int, width: int, fuses: bool
):
    net = nn.Linear(512, width, device="meta")
    pipeline = Pipeline(0, 2, torch.device("cpu"), cast(Any, None), cast(Any, None))
    attach(net, "net", owner, pipeline)
    assert pipeline.fuses == fuses


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", ["embedding", "linear"])
def test_two_gradients_for_what_one_node_computed_count_once_each(kind, at_once, monkeypatch):
    """A tensor that two others stand for has its node twice among the roots; autograd visits it once."""
    monkeypatch.setattr("weft.torch.backward.weight_gradients.FUSED_BYTES", 0)
    module = nn.Embedding(5, 3) if kind == "embedding" else nn.Linear(4, 3, bias=False)
    given = torch.tensor([0, 2, 2]) if kind == "embedding" else torch.randn(6, 4)
    y = module(given)
    one, other = torch.randn_like(y), torch.randn_like(y)
    (expected,) = torch.autograd.grad(module(given), [module.weight], one + other)
    edge = get_gradient_edge(y)
    tasks: list[Task] = []
    then = Task.at_once if at_once else tasks.append
    run_autograd([edge, edge], [one, other], take_weights([edge, edge], then, at_once))
    run_all(tasks)
    assert torch.allclose(module.weight.grad, expected)
