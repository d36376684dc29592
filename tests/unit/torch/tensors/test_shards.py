"""The core gathers shards by what their classes have said, also of classes derived from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.torch.tensors import shards


class Stays(torch.Tensor):
    pass


class Derived(Stays):
    pass


class OnUse(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_stay", {})
    monkeypatch.setattr(shards, "_on_use", {})
    shards.register(Stays, lambda tensor: torch.ones(1))
    shards.register(OnUse, lambda tensor: torch.zeros(1), on_use=True)


@pytest.mark.parametrize("kind", [Stays, Derived])
def test_what_stays_sharded_is_gathered(kind: Any):
    tensor = torch.empty(2).as_subclass(kind)
    assert shards.stays_sharded(tensor) and shards.gathered(tensor) == 1
    assert shards.used(tensor) is tensor


def test_what_gathers_itself_on_use_is_not_gathered_before():
    tensor = torch.empty(2).as_subclass(OnUse)
    assert not shards.stays_sharded(tensor) and shards.used(tensor) == 0


def test_a_plain_tensor_stays_as_it_is():
    tensor = torch.empty(2)
    assert not shards.stays_sharded(tensor) and shards.used(tensor) is tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_of_another_shape_gets_gradients_of_that_shape(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 3, dtype=dtype))
    x = torch.randn(2, 5, 3, dtype=dtype)
    alive = torch.nn.functional.linear(x, parameter)
    shards.resize(parameter, parameter.data[:2].clone())
    torch.nn.functional.linear(x, parameter).sum().backward()
    assert parameter.grad is not None and parameter.grad.shape == (2, 3) and alive.requires_grad
