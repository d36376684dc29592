"""Losses of each number by itself: each rank computes those of its part, whatever PyTorch adds to the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.torch.tensor_parallel.sharded_activations import rules, sharded_activation
from weft.torch.tensor_parallel.sharded_activations.watch import Alone
from weft.torch.tensors.shards import ShardPositions

NUMBERS = torch.Generator().manual_seed(0)
X, Y, WEIGHT = (torch.rand(2, 6, 7, generator=NUMBERS) for _ in range(3))
LOSSES: list[Callable[..., Tensor]] = [
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits,
]  # fmt: skip


def noted(function: Callable[..., Tensor], along: int = 1, **named: Any) -> tuple[Tensor, list[str]]:
    """What the function gives for a tensor in parts, and whether the whole was taken."""
    shard_group = Alone(torch.device("cpu"), 2)
    given = sharded_activation(
        X, shard_group, along, ShardPositions.contiguous([X.shape[along]]), frozenset(["it"])
    )
    return function(given, Y, **named), [*shard_group.notes["it"]]


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_on_the_parts(function: Callable[..., Tensor], reduction: str) -> None:
    found, how = noted(function, reduction=reduction)
    assert how == [rules.PARTS]
    expected = function(X, Y, reduction=reduction)
    torch.testing.assert_close(getattr(found, "part", found), expected)


@pytest.mark.parametrize("function", [F.mse_loss, F.huber_loss, F.binary_cross_entropy_with_logits])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_count_in_a_mean(function: Callable[..., Tensor], reduction: str) -> None:
    found, _ = noted(function, reduction=reduction, weight=WEIGHT)
    torch.testing.assert_close(found, function(X, Y, reduction=reduction, weight=WEIGHT))


def test_weights_of_classes() -> None:
    found, how = noted(F.binary_cross_entropy_with_logits, 2, pos_weight=WEIGHT[0, 0])
    assert how == [rules.PARTS]
    torch.testing.assert_close(found, F.binary_cross_entropy_with_logits(X, Y, pos_weight=WEIGHT[0, 0]))


def test_old_arguments_take_the_whole() -> None:
    with pytest.warns(UserWarning, match="deprecated"):
        found, how = noted(F.mse_loss, reduce=False)
        torch.testing.assert_close(found, F.mse_loss(X, Y, reduce=False))
    assert "whole" in how
