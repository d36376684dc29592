"""What a script does with weights between its steps: one process's numbers, or an error that names the owner."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft.torch as weft
from tests import models
from tests.training import step_of
from weft.errors import UsageError
from weft.torch.clip import norm_along

from .harness import MICROBATCHES, WIDTH, check, seeded, sgd, squared_error, start, vectors


def two() -> nn.Module:
    """A part on each rank, with statistics on both."""
    return models.Composed(
        lambda net, x: net.second(net.first(x).relu()),
        first=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
        second=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    )


step = step_of(squared_error)


def train_alone(net: nn.Module, batch: Any) -> None:
    for n in range(MICROBATCHES):
        part = {name: rows.chunk(MICROBATCHES)[n] for name, rows in batch.items()}
        (squared_error(net, part) / MICROBATCHES).backward()


def trained(steps: int = 1) -> tuple[Any, nn.Module, nn.Module, Any]:
    """A split model after some steps, the wrapped module, the same in one process, and the split one's optimizer."""
    net = seeded(two)
    alone = copy.deepcopy(net)
    start(auto_partition=False)
    weft.set_partition(net.second, 1)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(sgd(model.parameters()))
    single = sgd(alone.parameters())
    for batch in vectors(steps=steps):
        optimizer.zero_grad()
        single.zero_grad()
        step(model, batch)
        train_alone(alone, batch)
        if batch is not None and steps > 1:
            optimizer.step()
            single.step()
    return model, net, alone, optimizer


def same(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected.detach(), rtol=1e-5, atol=1e-6)


def refused(act: Callable[[], Any], *named: str) -> None:
    with pytest.raises(UsageError) as caught:
        act()
    for name in named:
        assert name in str(caught.value), f"{name} is not named: {caught.value}"


def other(net: nn.Module) -> tuple[str, nn.Module]:
    """The part of the other rank."""
    name = "second" if weft.pp_rank() == 0 else "first"
    return name, getattr(net, name)


def own(net: nn.Module) -> nn.Module:
    return getattr(net, "first" if weft.pp_rank() == 0 else "second")  # type: ignore[no-any-return]


@check
def norms_of_gradients_are_of_the_whole_model() -> list[float]:
    """PyTorch's functions, whatever name a script has for them."""
    model, _, alone, _ = trained()
    expected = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None])
    found = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    same(found, expected)
    same(weft.clip_grad_norm_(model, 1e9), expected)
    largest = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, float("inf"))
    same(largest, torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9, float("inf")))
    same(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1), expected)
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    for (name, parameter), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        if model.is_local(name.removeprefix("module.")):
            same(parameter.grad, whole.grad)
    return [float(found)]


@check
def norms_have_the_widest_precision_of_all_ranks() -> list[float]:
    trained()
    kind, expected = (torch.float64, 3.0) if weft.pp_rank() == 0 else (torch.bfloat16, 4.0)
    found = norm_along("mp", [torch.full((1,), expected, dtype=kind)], 2.0, "a test")
    assert found.dtype == torch.float64 and float(found) == 5.0
    assert float(norm_along("mp", [torch.full((1,), expected, dtype=kind)], math.inf, "a test")) == 4.0
    return [float(found)]


@check
def norm_of_one_ranks_gradients() -> None:
    """Its owner has it; on the other rank it cannot be read."""
    _, net, alone, _ = trained()
    norm = torch.nn.utils.clip_grad_norm_(net.second.parameters(), 0.01)
    if weft.pp_rank() == 1:
        same(norm, torch.nn.utils.clip_grad_norm_(alone.second.parameters(), 0.01))
    else:
        refused(lambda: float(norm), "second.0.weight", "partition 1")
    torch.nn.utils.clip_grad_value_(net.parameters(), 1e-3)
    assert all(p.grad.abs().max() <= 1e-3 for p in own(net).parameters() if p.grad is not None)


@check
def parameters_outside_of_the_model_count_once() -> list[float]:
    """They are on every rank, with the same gradient."""
    model, _, alone, _ = trained()
    extra = nn.Parameter(torch.ones(3))
    extra.grad = torch.full((3,), 2.0)
    expected = math.sqrt(float(weft.clip_grad_norm_(model, 1e9)) ** 2 + 12)
    found = float(torch.nn.utils.clip_grad_norm_([*model.parameters(), extra], 1.0))
    assert abs(found - expected) < 1e-4 * expected
    same(extra.grad, torch.full((3,), 2.0 / (expected + 1e-6)))
    return [found]


@check
def values_of_other_ranks_cannot_be_read() -> None:
    """Neither those of parameters nor those of statistics, in whatever way."""
    _, net, _, _ = trained()
    name, part = other(net)
    weight, mean = part[0].weight, part[1].running_mean
    reads: list[Callable[[], Any]] = [
        lambda: weight.sum().item(),
        lambda: bool((weight > 0).any()),
        lambda: weight.detach().numpy(),
        lambda: float(weight.norm()),
        lambda: weight[0, 0].tolist(),
        lambda: torch.allclose(weight, weight),
        lambda: torch.save(weight, io.BytesIO()),
        lambda: torch.save(net.state_dict(), io.BytesIO()),
        lambda: torch.save(net, io.BytesIO()),
        lambda: sum(p.pow(2).sum() for p in net.parameters()).item(),
        lambda: torch.nn.utils.parameters_to_vector(net.parameters()),
        lambda: weight.sum().backward(),
        lambda: next(iter(weight)).sum().item(),
    ]
    for read in reads:
        refused(read, "partition")
    refused(lambda: float(mean.sum()), f"{name}.1.running_mean", f"partition {1 - weft.pp_rank()}")
    assert f"{name}.0.weight, on partition {1 - weft.pp_rank()}" in f"{weight} {weight!r}"
    assert weight.shape == (WIDTH, WIDTH) and weight.dtype == torch.float32
    assert (
        isinstance(weight, nn.Parameter)
        and isinstance(mean, Tensor)
        and sum(p.numel() for p in net.parameters())
    )
    assert own(net)[0].weight.sum().item() == own(net)[0].weight.sum().item()


@check
def gradients_of_other_ranks_stand_for_their_owners() -> None:
    """A script sees that they are there; what it computes of all of them is refused, and not each rank's own."""
    model, net, _, _ = trained()
    name, _ = other(net)
    weight = net.get_parameter(f"{name}.0.weight")
    parameters = [*model.parameters()]
    grads = [p.grad for p in parameters if p.grad is not None]
    assert len(grads) == len(parameters) and weight.grad is not None
    assert weight.grad.shape == weight.shape and weight.grad.device == weight.device
    assert f"the gradient of {name}.0.weight, on partition {1 - weft.pp_rank()}" in str(weight.grad)
    reads: list[Callable[[], Any]] = [
        lambda: sum(grad.norm() ** 2 for grad in grads).sqrt().item(),
        lambda: sum(float(grad.square().sum()) for grad in grads),
        lambda: float(torch.norm(torch.stack([grad.norm(p=2) for grad in grads]))),
        lambda: torch.cat([grad.flatten() for grad in grads]).norm(),
        lambda: any(torch.isnan(grad).any() for grad in grads),
        lambda: [p.mul_(1 / sum(grad.norm() for grad in grads)) for p in parameters],
    ]
    for read in reads:
        refused(read, "the gradient of ", "get_total_norm")
    seen: list[Any] = []

    class Schedule(torch.optim.lr_scheduler.LRScheduler):
        """Like that of transformers for Adafactor: it reads the states of parameters with gradients."""

        def get_lr(self) -> list[float | Tensor]:
            seen.append(weight.grad)
            return [*self.base_lrs]

    Schedule(sgd(model.parameters())).step()
    assert seen == [None, None]
    weight.requires_grad_(False)
    assert weight.grad is None


@check
def gradients_may_be_changed_by_hand() -> list[float]:
    """Each rank runs the same lines; each changes what is its own."""
    model, net, alone, optimizer = trained(steps=2)
    single = sgd(alone.parameters())
    means = {model: [torch.zeros_like(p) for p in net.parameters()]}
    means[alone] = [torch.zeros_like(p) for p in alone.parameters()]
    for batch in vectors(steps=2):
        for each in (model, alone):
            if each is model:
                optimizer.zero_grad(set_to_none=False)
                step(model, batch)
            else:
                single.zero_grad(set_to_none=False)
                train_alone(alone, batch)
            for p in each.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
                    p.grad = p.grad.clamp(-0.1, 0.1)
            torch._foreach_mul_([p.grad for p in each.parameters()], 1.5)
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05)
            with torch.no_grad():
                for p, mean in zip(each.parameters(), means[each], strict=True):
                    mean.mul_(0.9).add_(p.grad)
                    p -= 0.1 * mean
        optimizer.step()
        single.step()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name])
    return []


@check
def what_is_written_reaches_the_owner() -> None:
    """Each rank runs the same lines; each keeps what is its own."""
    model, net, alone, _ = trained()
    for module in (net, alone):
        with torch.no_grad():
            nn.init.constant_(module.second[0].bias, 0.25)
            for n, parameter in enumerate(module.parameters()):
                parameter.mul_(0.5).add_(n)
                parameter.data = parameter.data * 2
            module.first[0].weight.copy_(torch.eye(WIDTH))
            module.second[1].running_mean.zero_()
            torch._foreach_mul_(list(module.parameters()), 3.0)
            module.second[0].weight[0] = 7.0
        module.double()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}
        module.float()
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in alone.state_dict().items())


@check
def values_of_two_ranks_do_not_mix() -> None:
    """What would need both is refused on each of them, where the values would be written or read."""
    model, net, alone, _ = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def momentum() -> None:
        for q, k in zip(net.first.parameters(), net.second.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    def lerp() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(list(net.second.parameters()), list(net.first.parameters()), 0.1)

    def copy_() -> None:
        net.second[0].load_state_dict(net.first[0].state_dict())

    local = [p.detach().clone() for p in alone.parameters()]

    def average() -> None:
        for mine, parameter in zip(local, net.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.5)

    for act in (momentum, lerp, copy_, average):
        told = ""
        try:
            act()
        except (
            UsageError,
            RuntimeError,
        ) as error:  # load_state_dict puts what it met into an error of its own
            told = str(error)
        assert any("lives on partition" in each for each in weft.allgather(told, weft.WORLD)), act
        if told:
            assert "lives on partition" in told, told
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def averages(of: Any, use: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    yield "averaged", AveragedModel(use(of), use_buffers=True)
    yield "moving", AveragedModel(use(of), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    yield "own", AveragedModel(use(of), avg_fn=lambda old, new, count: 0.5 * old + 0.5 * new)


def average_weights(before: bool) -> None:
    net = seeded(two)
    alone = copy.deepcopy(net)
    start(auto_partition=False)
    weft.set_partition(net.second, 1)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(sgd(model.parameters()))
    single = sgd(alone.parameters())
    batches = vectors(steps=3)
    kept: list[Any] = []
    if not before:
        step(model, batches[0])
        train_alone(alone, batches[0])
        for each in (*model.parameters(), *alone.parameters()):
            each.grad = None
    kept = [(name, AveragedModel, split) for name, split in averages(model, lambda m: m)]
    expected = [whole for _, whole in averages(alone, lambda m: m)]
    for batch in batches:
        optimizer.zero_grad()
        single.zero_grad()
        step(model, batch)
        train_alone(alone, batch)
        optimizer.step()
        single.step()
        for (_, _, split), whole in zip(kept, expected, strict=True):
            split.update_parameters(model)
            whole.update_parameters(alone)

    @weft.step
    def evaluate(model: Any, batch: Any) -> Tensor:
        return model(batch["x"])  # type: ignore[no-any-return]

    for (name, _, split), whole in zip(kept, expected, strict=True):
        state = {
            key.replace(".module.module.", ".module."): value for key, value in split.state_dict().items()
        }
        for key, value in whole.state_dict().items():
            same(state[key], value), name
        split.eval()
        whole.eval()
        same(evaluate(split, batches[0]).concat(), whole(batches[0]["x"]))


@check
def averages_of_weights_made_before_the_split() -> None:
    """They are split as their model is, when it is."""
    average_weights(before=True)


@check
def averages_of_weights_made_after_the_split() -> None:
    average_weights(before=False)


@check
def a_copy_trains_by_itself() -> None:
    """`copy.deepcopy(model)` has weights of its own, on the same ranks."""
    model, _, alone, _ = trained()
    twin, single = copy.deepcopy(model), copy.deepcopy(alone)
    (batch,) = vectors(steps=1)
    for each in (*twin.parameters(), *single.parameters()):
        each.grad = None
    step(twin, batch)
    train_alone(single, batch)
    for name, parameter in twin.local_named_parameters():
        same(parameter.grad, single.get_parameter(name.removeprefix("module.")).grad)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(twin.state_dict()[name].any() for name, _ in single.named_parameters())


@check
def a_copy_of_the_wrapped_module_is_no_model_of_its_own() -> None:
    """It has this rank's part only, so it is refused where it would compute."""
    model, net, _, _ = trained()
    twin = copy.deepcopy(net)
    x = vectors(steps=1)[0]["x"]
    refused(lambda: twin(x), "lives on partition")
    refused(lambda: torch.save(model, io.BytesIO()), "state_dict()")


@check
def states_of_modules_around_the_model() -> None:
    """A script's own module that has the model as a child gives and takes the whole state."""
    model, _, alone, _ = trained()
    around, single = nn.ModuleDict({"a": model}), nn.ModuleDict({"a": alone})
    state = {name.replace("a.module.", "a."): value for name, value in around.state_dict().items()}
    for name, value in single.state_dict().items():
        same(state[name], value)


@check
def an_optimizer_that_is_not_wrapped_is_told() -> None:
    """Once, on the first rank; one that is wrapped is not."""
    model, _, _, optimizer = trained()
    plain = sgd(model.parameters())
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.optimizer.step()
        assert not heard, [str(one.message) for one in heard]
        plain.step()
        plain.step()
    told = [str(one.message) for one in heard if "weft.DistributedOptimizer(SGD(...))" in str(one.message)]
    assert len(told) == (weft.rank() == 0), told
