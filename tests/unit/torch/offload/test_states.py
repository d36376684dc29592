"""Optimizer states outside of the device: the same numbers as in one call, and memory that is really left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from weft.errors import UsageError
from weft.torch.offload import states as module
from weft.torch.offload.states import OffloadedStates

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),  # makes its states at once
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", 1000)
    monkeypatch.setattr(module, "LEAST_BYTES", 16)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Conv2d(16, 6, 3).to(memory_format=torch.channels_last), nn.Linear(1, 4)
    )


def train(model: nn.Module, update: Callable[[], Any], steps: int, first: int = 0) -> None:
    for number in range(first, first + steps):
        random = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random)
        if number % 2:
            model[1].weight.grad = None  # type: ignore[union-attr]
        update()


def files() -> int:
    with open("/proc/self/maps") as maps:
        return maps.read().count("weft-offload-")


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bucket_by_bucket_is_the_same_as_at_once(name: str, copies: bool):
    plain, own = net(), net()
    one, other = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](own.parameters())
    offloaded = OffloadedStates(other, CPU, copies)
    before = files()
    train(plain, one.step, 4)
    train(own, offloaded.step, 4)
    assert all(map(torch.equal, plain.parameters(), own.parameters()))
    assert all(p.grad is not None for p in own[0].parameters()), "gradients are there again"
    expected, found = one.state_dict()["state"], other.state_dict()["state"]
    assert expected.keys() == found.keys()
    for number, entry in expected.items():
        for key, value in entry.items():
            assert torch.equal(value, found[number][key]), (number, key)
    if name != "adafactor":
        assert files() > before


@pytest.mark.parametrize("copies", [False, True])
def test_states_are_saved_and_loaded(copies: bool, tmp_path: Any):
    plain, own = net(), net()
    one, other = OPTIMIZERS["adamw"](plain.parameters()), OPTIMIZERS["adamw"](own.parameters())
    train(plain, one.step, 5)
    offloaded = OffloadedStates(other, CPU, copies)
    train(own, offloaded.step, 3)
    torch.save(other.state_dict(), tmp_path / "states.pt")
    again = OPTIMIZERS["adamw"](own.parameters())
    resumed = OffloadedStates(again, CPU, copies)
    resumed.load(torch.load(tmp_path / "states.pt", weights_only=True))
    train(own, resumed.step, 2, first=3)
    assert all(map(torch.equal, plain.parameters(), own.parameters()))


def test_hooks_are_called_once_a_step_and_see_all_gradients():
    model, calls = net(), []
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.register_step_pre_hook(
        lambda *_: calls.append(all(p.grad is not None for p in model.parameters()))
    )
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, OffloadedStates(optimizer, CPU).step, 1)
    assert calls == [True, "after"]


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as some packages do, and warms up by that."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    held = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                    held.add_(parameter.grad)
                    parameter.sub_(held, alpha=group["lr"] / group["step"])


class ByNorm(Counting):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / norm)


@pytest.mark.parametrize("late", [False, True], ids=["from zero", "from its first step on"])
def test_an_optimizer_that_counts_steps_in_its_groups_counts_each_once(late: bool):
    plain, own = net(), net()
    one, other = Counting(plain.parameters()), Counting(own.parameters())
    for optimizer in (one, other) if late else ():
        del optimizer.param_groups[0]["step"]
    train(plain, one.step, 3)
    train(own, OffloadedStates(other, CPU).step, 3)
    assert all(map(torch.equal, plain.parameters(), own.parameters()))
    assert other.param_groups[0]["step"] == 3


def test_the_setting_refuses_them_and_says_so(init: Callable[..., None]):
    init(offload={"optimizer": True}, verify="off")
    model = weft.DistributedModel(net()[0])
    optimizer = weft.DistributedOptimizer(ByNorm(model.parameters()))
    with pytest.raises(UsageError, match="ByNorm looks at several parameters at once"):
        optimizer.step()


def test_a_disk_without_room_is_told_before_anything_is_written(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = net()
    with pytest.raises(UsageError, match=r"offloading needs .* more in the folder .*No space left.*TMPDIR"):
        train(model, OffloadedStates(OPTIMIZERS["adamw"](model.parameters()), CPU).step, 1)
    assert all(p.grad is not None for p in model.parameters()), "the gradients are still there"


def test_the_states_are_not_in_the_memory_of_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    weights = [nn.Parameter(torch.zeros(1 << 20)) for _ in range(24)]  # 96 MiB, and 192 MiB of states

    def resident() -> int:
        with open("/proc/self/statm") as found:
            return int(found.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam(weights, foreach=False)
    offloaded = OffloadedStates(optimizer, CPU)
    before = resident()
    for _ in range(2):
        offloaded.step()
    assert resident() - before < 96
    assert float(optimizer.state[weights[7]]["exp_avg"].mean()) == pytest.approx(0.19)


def test_tensors_without_gradients_are_no_bucket():
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    OffloadedStates(optimizer, CPU).step()
    assert not optimizer.state


def test_a_loaded_state_of_other_layout_is_taken():
    weight = nn.Parameter(torch.randn(4, 6))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    offloaded = OffloadedStates(optimizer, CPU)
    weight.grad = torch.ones_like(weight)
    offloaded.step()
    turned: Tensor = torch.arange(24.0).view(6, 4).t()
    optimizer.state[weight]["momentum_buffer"] = turned.clone(memory_format=torch.preserve_format)
    offloaded.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], 0.9 * turned + 1)
