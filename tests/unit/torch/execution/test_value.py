"""Where gradients enter autograd's graphs, and what is left of that after a backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from weft.errors import UsageError
from weft.torch.backward.autograd import run_autograd
from weft.torch.execution.value import Batch, Segment, Value


def go_back(segment: Segment, value: Value, keep: bool = False) -> None:
    """A backward pass of a segment in which one value got the gradient 1."""
    value.add_grad(torch.ones(2))
    run_autograd(*segment.take_roots(keep), keep=keep)


def placed(tensor: Tensor) -> tuple[Segment, Value]:
    segment = Segment()
    value = Value(0, 1, Batch(0), segment, None)
    value.edge = get_gradient_edge(tensor)
    return segment, value


def test_every_backward_pass_reaches_a_leaf():
    """A leaf has no graph that a pass could free: a tied weight gets the gradients of two losses, say."""
    weight = nn.Parameter(torch.zeros(2))
    segment, value = placed(weight)
    go_back(segment, value)
    go_back(segment, value)
    assert weight.grad is not None and weight.grad.tolist() == [2, 2]


def test_a_second_backward_pass_does_not_reach_what_the_first_has_freed():
    weight = nn.Parameter(torch.zeros(2))
    segment, value = placed(weight * 2)
    go_back(segment, value, keep=True)
    go_back(segment, value)
    with pytest.raises(UsageError, match="which was freed then: give the earlier one retain_graph=True"):
        go_back(segment, value)
