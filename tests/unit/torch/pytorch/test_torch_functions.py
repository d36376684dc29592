"""Which functions write into which of their tensors, and that the sets do not overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.torch.pytorch import torch_functions
from weft.torch.pytorch.torch_functions import written

A, B = torch.ones(3), torch.ones(3)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "target"),
    [
        (Tensor.add_, (A, B), {}, A),
        (Tensor.__setitem__, (A, 0, B), {}, A),
        (Tensor.__iadd__, (A, B), {}, A),
        (torch.relu_, (A,), {}, A),
        (F.relu, (A,), {"inplace": True}, A),
        (F.relu, (), {"input": A, "inplace": True}, A),
        (torch.add, (A, B), {"out": B}, B),
        (Tensor.data.__set__, (A, B), {}, A),
        (Tensor.copy_, (A, B), {}, A),
        (Tensor.index_put_, (A, (B,), B), {}, A),
        (torch.nn.init.normal_, (A,), {}, A),
        (torch.add, (A, B), {}, None),
        (F.relu, (A,), {"inplace": False}, None),
        (Tensor.__add__, (A, B), {}, None),
        (Tensor.__getitem__, (A, 0), {}, None),
        (Tensor.data.__get__, (A,), {}, None),
        (torch.matmul, (A, B), {"out": None}, None),
    ],
)
def test_the_tensor_that_is_written(function: Any, args: Any, kwargs: Any, target: Tensor | None):
    for _ in range(2):
        assert written(function, args, kwargs) is target


def test_a_function_is_answered_in_one_way_only():
    assert not torch_functions.METADATA & torch_functions.READS
    assert not torch_functions.METADATA & torch_functions.LIKE
    assert not torch_functions.READS & torch_functions.LIKE
    assert not torch_functions.VIEWS & (
        torch_functions.READS | torch_functions.LIKE | torch_functions.METADATA
    )


@pytest.mark.parametrize(
    ("function", "group"),
    [
        (Tensor.shape.__get__, torch_functions.METADATA),
        (Tensor.size, torch_functions.METADATA),
        (Tensor.dim, torch_functions.METADATA),
        (Tensor.__len__, torch_functions.METADATA),
        (Tensor.requires_grad_, torch_functions.METADATA),
        (Tensor.item, torch_functions.READS),
        (Tensor.__bool__, torch_functions.READS),
        (Tensor.tolist, torch_functions.READS),
        (Tensor.numpy, torch_functions.READS),
        (torch.equal, torch_functions.READS),
        (torch.zeros_like, torch_functions.LIKE),
        (Tensor.new_zeros, torch_functions.LIKE),
        (Tensor.view, torch_functions.VIEWS),
        (Tensor.T.__get__, torch_functions.VIEWS),
    ],
)
def test_members(function: Any, group: Any):
    assert function in group
