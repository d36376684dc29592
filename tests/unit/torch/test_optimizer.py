"""The optimizer's wrapper in one process: schedulers, clipping, states, errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import weft.torch as weft
from tests.training import squares, step_of
from tests.unit.torch.networks import Chain
from weft.errors import UsageError

Init = Callable[..., None]
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return Chain(2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def rates_and_weights(
    net: nn.Module, optimizer: Any, scheduler: Any, run: Callable[[], Tensor]
) -> tuple[list[float], Tensor]:
    rates = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = run()
        optimizer.step()
        scheduler.step(loss) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        rates += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
    return rates, torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "unwrapped"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_take_the_wrapper_and_what_is_wrapped(name: str, wrapped: bool, init: Init):
    init()
    x = torch.ones(4, 8)

    def plain(net: nn.Module) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    alone = network()
    optimizer = sgd(alone.parameters())
    expected = rates_and_weights(alone, optimizer, SCHEDULERS[name](optimizer), lambda: plain(alone))
    net = network()
    model = weft.DistributedModel(net)
    inner = sgd(model.parameters())
    outer = weft.DistributedOptimizer(inner)
    train_step = step_of(squares)
    scheduler = SCHEDULERS[name](outer if wrapped else inner)
    actual = rates_and_weights(net, outer, scheduler, lambda: train_step(model, x).reduce_mean())
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])


def test_it_is_an_optimizer_with_the_parts_of_what_it_wraps(init: Init):
    init()
    inner = sgd(network().parameters())
    outer = weft.DistributedOptimizer(inner)
    assert isinstance(outer, torch.optim.Optimizer)
    assert outer.param_groups is inner.param_groups and outer.state is inner.state
    assert outer.defaults is inner.defaults and outer.optimizer is inner
    outer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    extra = nn.Parameter(torch.ones(2))
    outer.add_param_group({"params": [extra], "lr": 0.25})
    assert inner.param_groups[1]["params"] == [extra]
    assert repr(outer).startswith("DistributedOptimizer(SGD (")
    with pytest.raises(AttributeError):
        getattr(outer, "nothing_of_this_name")  # noqa: B009


def test_zero_grad_as_torch_does(init: Init):
    init()
    net = network()
    outer = weft.DistributedOptimizer(sgd(net.parameters()))
    for set_to_none in (True, False):
        net(torch.ones(1, 8)).sum().backward()
        outer.zero_grad(set_to_none=set_to_none)
        grads = [p.grad for p in net.parameters()]
        assert all(grad is None if set_to_none else not grad.any() for grad in grads)


def test_step_hooks_run(init: Init):
    init()
    net = network()
    outer = weft.DistributedOptimizer(sgd(net.parameters()))
    heard = []
    outer.register_step_pre_hook(lambda optimizer, args, kwargs: heard.append("before"))
    outer.register_step_post_hook(lambda optimizer, args, kwargs: heard.append("after"))
    outer.step()
    assert heard == ["before", "after"]


def test_copies_and_pickles(init: Init):
    init()
    outer = weft.DistributedOptimizer(sgd(network().parameters()))
    for copied in (copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))):
        assert copied.param_groups[0]["lr"] == 0.1 and copied.optimizer is not outer.optimizer


def test_states_are_those_of_torch_and_load(init: Init):
    init()
    net = network()
    outer = weft.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.1))
    net(torch.ones(1, 8)).sum().backward()
    outer.step()
    whole, local = outer.state_dict(), outer.local_state_dict()
    assert local.pop("_smp_is_partial") is False
    assert whole["param_groups"] == local["param_groups"] and whole["state"].keys() == local["state"].keys()
    plain = torch.optim.AdamW(network().parameters(), lr=0.3)
    plain.load_state_dict(whole)
    assert plain.param_groups[0]["lr"] == 0.1
    for source in (whole, plain.state_dict(), outer.local_state_dict()):
        fresh = weft.DistributedOptimizer(torch.optim.AdamW(network().parameters(), lr=0.3))
        fresh.load_state_dict(source)
        assert fresh.param_groups[0]["lr"] == 0.1
        for mine, theirs in zip(fresh.state.values(), outer.state.values(), strict=True):
            assert torch.equal(mine["exp_avg"], theirs["exp_avg"]) and mine["step"] == theirs["step"] == 1


class Around(torch.optim.Optimizer):
    """As ``torch_optimizer.Lookahead``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def test_errors(init: Init):
    init()
    inner = sgd(network().parameters())
    outer = weft.DistributedOptimizer(inner)
    with pytest.raises(
        UsageError, match=r"wraps a torch\.optim optimizer, once; it got a DistributedOptimizer"
    ):
        weft.DistributedOptimizer(outer)
    with pytest.raises(UsageError, match="it got a list"):
        weft.DistributedOptimizer([])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Around does not call .*, Around\(weft.DistributedOptimizer"):
        weft.DistributedOptimizer(Around(inner))
    lbfgs = weft.DistributedOptimizer(torch.optim.LBFGS(network().parameters()))
    with pytest.raises(
        UsageError, match="LBFGS looks at all parameters at once, and a rank has only its own"
    ):
        lbfgs.step(lambda: 0.0)


def test_a_closure_computes_the_gradients_before_the_update(init: Init):
    init()
    nets = network(), network()
    nets[1].load_state_dict(nets[0].state_dict())
    plain, outer = sgd(nets[0].parameters()), weft.DistributedOptimizer(sgd(nets[1].parameters()))

    def closure(net: torch.nn.Module) -> torch.Tensor:
        loss = net(torch.ones(4, 8)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [
            each.step(lambda net=net: closure(net)) for each, net in zip((plain, outer), nets, strict=True)
        ]
    assert losses[0] == losses[1]
    for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


# --- clipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-2, 1e4])
def test_clipping_is_what_torch_does(max_norm: float, norm_type: float, init: Init):
    init()
    one, other = network(), network()
    for net in (one, other):
        net(torch.ones(4, 8)).square().sum().backward()
    next(one.parameters()).grad = next(other.parameters()).grad = None
    mine = weft.clip_grad_norm_(one, max_norm, norm_type)
    theirs = nn.utils.clip_grad_norm_(other.parameters(), max_norm, norm_type)
    assert torch.equal(mine, theirs)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_clipping_takes_parameters_models_and_shared_ones_once(init: Init):
    init()
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.full((4,), 3.0)
    assert weft.clip_grad_norm_([p, p], 1e9).item() == 6.0
    assert weft.clip_grad_norm_(iter([p]), 3.0).item() == 6.0
    assert torch.allclose(p.grad, torch.full((4,), 1.5))


def test_clipping_without_gradients_gives_zero(init: Init):
    init()
    assert weft.clip_grad_norm_(network(), 1.0).item() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norms_that_are_no_numbers(bad: float, init: Init):
    init()
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([1.0, bad])
    with pytest.raises(
        RuntimeError, match=f"norm of the gradients over all ranks is {bad}, so they cannot be"
    ):
        weft.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert p.grad[0] == 1, "nothing was scaled"
    assert not torch.isfinite(weft.clip_grad_norm_([p], 1.0))
