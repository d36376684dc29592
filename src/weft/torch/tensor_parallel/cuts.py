"""Cuts of a parameter, and full tensors from shards and back.

A fused projection holds several results behind each other, of which each rank needs a part. So a dimension is cut in
blocks: rank 0 of 2 holds the first half of each block. Where the number of ranks does not divide a block, the first
ranks have one more of it.

>>> cut_by(torch.arange(12), Cut(0, (8, 4), (12,)), 0, 2)
tensor([0, 1, 2, 3, 8, 9])
>>> joined([cut_by(torch.arange(12), Cut(0, (8, 4), (12,)), rank, 2) for rank in (0, 1)], Cut(0, (8, 4), (12,)))
tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.tensors.marks import CUT
from weft.torch.tensors.shards import resize


class Holders(Protocol):
    """The ranks that hold the parts of a tensor: those of one group along ``axis`` of the mesh."""

    axis: str
    group: Any
    rank: int
    size: int

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """The tensors of all of them, in their order; ``sizes``: how large each is along ``dim``."""
        ...


@dataclass(frozen=True)
class Cut:
    """The cut of a tensor.

    Attributes:
        dim: The dimension that is cut.
        blocks: Sizes along ``dim`` of what is cut by itself; they add up to the size of the whole.
        shape: The shape of the whole.
        holder: The rank that has all of it, where the others have nothing; None where each has a part.
    """

    dim: int
    blocks: tuple[int, ...]
    shape: tuple[int, ...]
    holder: int | None = None

    def sizes(self, size: int) -> list[list[int]]:
        """For each block how much of it each of ``size`` ranks has."""
        if self.holder is None:
            return [part_sizes(block, size) for block in self.blocks]
        return [[block * (rank == self.holder) for rank in range(size)] for block in self.blocks]

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """The shape of the part of ``rank`` of ``size``."""
        own = sum(sizes[rank] for sizes in self.sizes(size))
        return tuple(own if dim == self.dim else n for dim, n in enumerate(self.shape))


def part_sizes(total: int, size: int) -> list[int]:
    """The number of elements that each of ``size`` ranks has of ``total``.

    >>> part_sizes(50257, 2), part_sizes(5, 4)
    ([25129, 25128], [2, 1, 1, 1])
    """
    return [total // size + (rank < total % size) for rank in range(size)]


def cut_by(tensor: Tensor, how: Cut, rank: int, size: int) -> Tensor:
    """The part of ``rank``, contiguous, in memory of its own."""
    blocks = tensor.split(how.blocks, how.dim)
    sizes = how.sizes(size)
    shards = [block.split(each, how.dim)[rank] for block, each in zip(blocks, sizes, strict=True)]
    return torch.cat(shards, how.dim)


def joined(shards: Sequence[Tensor], how: Cut) -> Tensor:
    """The whole of the parts of all ranks in their order."""
    sizes = how.sizes(len(shards))
    blocks = [shard.split([each[n] for each in sizes], how.dim) for n, shard in enumerate(shards)]
    return torch.cat([piece for pieces in zip(*blocks, strict=True) for piece in pieces], how.dim)


def cuts_of(parameter: Tensor) -> tuple[tuple[Cut, Holders], ...]:
    """The cuts of a parameter, and the ranks that hold its shards; the cut of the whole first, then that of a part
    of it."""
    return getattr(parameter, CUT) or ()


def mark(parameter: Tensor, how: Cut, shard_group: Holders) -> None:
    """Say on the parameter that it is a part, of the whole or of the part that it was before."""
    setattr(parameter, CUT, (*cuts_of(parameter), (how, shard_group)))


def mark_copies(
    module: nn.Module, cuts: Mapping[str, Cut], shard_group: Holders, memo: Mapping[int, Any]
) -> None:
    """Mark the copies of a module's parameters: ``copy.deepcopy`` leaves marks out. ``memo``: its own."""
    for name, how in cuts.items():
        parameter = memo.get(id(module.get_parameter(name)))
        if parameter is not None and not is_cut(parameter):  # modules may share it
            mark(parameter, how, shard_group)


def unmark(parameter: Tensor) -> None:
    """The parameter is again what it was before the latest cut."""
    setattr(parameter, CUT, cuts_of(parameter)[:-1] or None)


def is_cut(parameter: Tensor) -> bool:
    """True if the parameter is this rank's part of a larger one."""
    return getattr(parameter, CUT) is not None


def axes_of(parameter: Tensor) -> set[str]:
    """The axes of the mesh along which ranks hold parts of the parameter."""
    return {shard_group.axis for _, shard_group in cuts_of(parameter)}


def holders_along(axis: str, parameter: Tensor) -> int:
    """The number of ranks along an axis of the mesh that hold the parameter together; 1 where each has all of it."""
    return max(
        (shard_group.size for _, shard_group in cuts_of(parameter) if shard_group.axis == axis), default=1
    )


def cut_of(parameter: Tensor) -> Cut | None:
    """The cut of the whole parameter; None if it is whole. This rank may have only a part of that part."""
    found = cuts_of(parameter)
    return found[0][0] if found else None


def full_tensor(parameter: Tensor, value: Tensor | None = None) -> Tensor:
    """The whole of a parameter, from all ranks that hold parts of it, which call this together.

    Args:
        parameter: A parameter that was cut; any other tensor comes back as it is.
        value: Another tensor that is cut like the parameter: its gradient, or a state of an optimizer. One of another
            shape than the parameter's (a count of steps) comes back as it is.
    """
    own = (parameter if value is None else value).detach()
    if own.shape != parameter.shape:
        return own
    for how, shard_group in reversed(cuts_of(parameter)):
        sizes = [sum(each) for each in zip(*how.sizes(shard_group.size), strict=True)]
        own = joined(shard_group.gather(own, how.dim, sizes), how)
    return own


def cut(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a full tensor, cut as the parameter is; the tensor itself if the parameter is whole.

    Args:
        value: It has the shape of the whole, or of a part that was cut again.
        parameter: The parameter.

    Raises:
        UsageError: The tensor has another shape.
    """
    found = cuts_of(parameter)
    if not found:
        return value
    if not can_cut(value, parameter):
        raise UsageError(
            f"a tensor of shape {tuple(value.shape)} cannot be cut like a parameter whose whole has shape "
            f"{found[0][0].shape}; hand in the full tensor"
        )
    for how, shard_group in found:
        if tuple(value.shape) == how.shape:
            value = cut_by(value, how, shard_group.rank, shard_group.size)
    return value


def can_cut(value: Tensor, parameter: Tensor) -> bool:
    """True if the value has the shape of the whole of a parameter that is cut, or of a part that was cut again."""
    return any(tuple(value.shape) == how.shape for how, _ in cuts_of(parameter))


def cut_in_place(parameter: Any, how: Cut, shard_group: Holders) -> None:
    """Let a whole parameter, and its gradient, be this rank's part only; it stays the same object.

    One without data is cut when it is made.
    """
    if parameter.device.type != "meta":
        grad, parameter.grad = parameter.grad, None
        with torch.no_grad():
            resize(parameter, cut_by(parameter.data, how, shard_group.rank, shard_group.size))
            if grad is not None:
                parameter.grad = cut_by(grad, how, shard_group.rank, shard_group.size)
    mark(parameter, how, shard_group)
