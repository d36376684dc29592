"""Parts of tensors, and wholes from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.torch.tensor_parallel import Cut, Linear, axes_of, can_cut, cut, cut_of, full_tensor, is_cut
from weft.torch.tensor_parallel.cuts import cut_by, joined, mark, unmark
from weft.torch.tensor_parallel.linears import cuts_of


@given(st.integers(1, 4), st.lists(st.integers(1, 11), min_size=1, max_size=4), st.integers(0, 1))
def test_parts_join_to_the_whole(size: int, sizes: list[int], dim: int):
    blocks = tuple(sizes)
    shape = (sum(blocks), 3) if dim == 0 else (3, sum(blocks))
    tensor = torch.arange(3 * sum(blocks)).view(shape)
    how = Cut(dim, blocks, shape)
    parts = [cut_by(tensor, how, rank, size) for rank in range(size)]
    for rank, part in enumerate(parts):
        assert tuple(part.shape) == how.local_shape(rank, size) and part.is_contiguous()
    assert torch.equal(joined(parts, how), tensor)


def test_a_block_of_each_goes_to_each_rank():
    """A fused projection of queries, keys and values: rank 1 has the second half of each."""
    fused = torch.tensor([10, 11, 12, 13, 20, 21, 30, 31])
    assert cut_by(fused, Cut(0, (4, 2, 2), (8,)), 1, 2).tolist() == [12, 13, 21, 31]


@pytest.mark.parametrize(
    ("linear", "weight", "bias"),
    [
        (Linear("column", (6, 2)), Cut(0, (6, 2), (8, 4)), Cut(0, (6, 2), (8,))),
        (Linear("column"), Cut(0, (8,), (8, 4)), Cut(0, (8,), (8,))),
        (Linear("row"), Cut(1, (4,), (8, 4)), None),
    ],
)
def test_how_a_linear_is_cut(linear: Linear, weight: Cut, bias: Cut | None):
    assert cuts_of(nn.Linear(4, 8), linear) == {"weight": weight, **({"bias": bias} if bias else {})}


def test_a_transposed_linear_is_cut_the_other_way():
    from transformers.pytorch_utils import Conv1D

    module = Conv1D(8, 4)
    assert cuts_of(module, Linear("column", (4, 4)))["weight"] == Cut(1, (4, 4), (4, 8))
    assert cuts_of(module, Linear("row")) == {"weight": Cut(0, (4,), (4, 8))}


def test_a_whole_parameter_is_its_own_part():
    parameter = nn.Parameter(torch.ones(3))
    assert not is_cut(parameter) and cut_of(parameter) is None
    value = torch.zeros(2)
    assert cut(value, parameter) is value and torch.equal(full_tensor(parameter), parameter)


class Imagined:
    """Ranks along an axis, which hold these parts."""

    def __init__(self, axis: str, rank: int, parts: list[torch.Tensor]) -> None:
        self.axis, self.rank, self.size, self.parts = axis, rank, len(parts), parts

    def gather(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> list[torch.Tensor]:
        assert torch.equal(tensor, self.parts[self.rank])
        return self.parts


def test_a_part_may_be_cut_again():
    tensor, how, again = torch.arange(24.0).view(6, 4), Cut(0, (6,), (6, 4)), Cut(1, (4,), (3, 4))
    parts = [cut_by(tensor, how, rank, 2) for rank in range(2)]
    for rank, replica in ((0, 1), (1, 0)):
        shares = [cut_by(parts[rank], again, each, 2) for each in range(2)]
        parameter = nn.Parameter(shares[replica])
        mark(parameter, how, Imagined("tp", rank, parts))
        mark(parameter, again, Imagined("rdp", replica, shares))
        assert axes_of(parameter) == {"tp", "rdp"} and cut_of(parameter) is how
        assert torch.equal(full_tensor(parameter), tensor)
        for value in (tensor, parts[rank]):
            assert can_cut(value, parameter) and torch.equal(cut(value, parameter), shares[replica])
        assert not can_cut(shares[replica], parameter)
        unmark(parameter)
        assert axes_of(parameter) == {"tp"} and torch.equal(cut(tensor, parameter), parts[rank])
        unmark(parameter)
        assert not is_cut(parameter)
