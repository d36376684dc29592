"""The ranks that share parameters, and what they send each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import UsageError
from weft.torch.tensor_parallel import Cut
from weft.torch.tensor_parallel.cuts import cut_by, joined

ALONE_BYTES = 1 << 20
"""From so many bytes of a share on, one that is a run of the whole's memory travels by itself, without copies."""


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ShardingGroup:
    """The ranks that share parameters. Replicas have the same ones.

    Attributes:
        rank: This rank's number among them.
        size: How many they are.
    """

    axis = "rdp"

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """The tensors of all ranks, in their order; each has the same shape, so ``sizes`` along ``dim`` are alike."""
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(
            [part.view(-1).view(torch.uint8) for part in parts],
            own.view(-1).view(torch.uint8),
            group=self.group,
        )
        return parts

    def all_gather(self, shares: Sequence[Tensor], cuts: Sequence[Cut]) -> list[Tensor]:
        """The wholes of shares, each in memory of its own; collective."""
        found: dict[int, Tensor] = {}
        small = []
        for number, (share, how) in enumerate(zip(shares, cuts, strict=True)):
            if share.nbytes < ALONE_BYTES or not is_run(how):
                small.append(number)
                continue
            found[number] = torch.empty(how.shape, dtype=share.dtype, device=share.device)
            _gather(_bytes(found[number]), _bytes(share.contiguous()), group=self.group)
        small.sort(key=lambda number: -shares[number].itemsize)  # so that all begin where their dtype may
        if small:
            own = torch.cat([_bytes(shares[number].contiguous()) for number in small])
            everything = own.new_empty(self.size * own.numel())
            _gather(everything, own, group=self.group)
            sizes = [shares[number].nbytes for number in small]
            pieces = zip(*(part.split(sizes) for part in everything.chunk(self.size)), strict=True)
            for number, each in zip(small, pieces, strict=True):
                share = shares[number]
                found[number] = joined(
                    [piece.view(share.dtype).view(share.shape) for piece in each], cuts[number]
                )
        return [found[number] for number in range(len(shares))]

    def reduce_scatter(
        self, full_tensors: list[Tensor | None], shares: Sequence[Tensor], cuts: Sequence[Cut]
    ) -> list[Tensor]:
        """This rank's shares of the sums of all ranks of the sharding group' tensors; collective.

        ``full_tensors``: this rank's, None for zeros; the list is emptied. ``shares``: tensors like the results.
        """
        found: dict[int, Tensor] = {}
        small: dict[torch.dtype, list[int]] = {}
        for number, (share, how) in enumerate(zip(shares, cuts, strict=True)):
            if share.nbytes < ALONE_BYTES or not is_run(how):
                small.setdefault(share.dtype, []).append(number)
                continue
            whole, full_tensors[number] = full_tensors[number], None
            if whole is None:
                whole = torch.zeros(how.shape, dtype=share.dtype, device=share.device)
            found[number] = torch.empty(share.shape, dtype=share.dtype, device=share.device)
            _reduce_scatter(found[number].view(-1), whole.contiguous().view(-1), group=self.group)
            del whole
        for dtype, numbers in small.items():
            sizes = [shares[number].numel() for number in numbers]
            flat = torch.zeros(self.size, sum(sizes), dtype=dtype, device=shares[numbers[0]].device)
            for number, places in zip(numbers, flat.split(sizes, 1), strict=True):
                whole, full_tensors[number] = full_tensors[number], None
                if whole is not None:
                    for rank, place in enumerate(places):
                        place.copy_(cut_by(whole, cuts[number], rank, self.size).view(-1))
                del whole
            own = torch.empty(sum(sizes), dtype=dtype, device=flat.device)
            _reduce_scatter(own, flat.view(-1), group=self.group)
            for number, piece in zip(numbers, own.split(sizes), strict=True):
                found[number] = piece.view(shares[number].shape).clone()
        full_tensors.clear()
        return [found[number] for number in range(len(shares))]

    def __deepcopy__(self, memo: Any) -> ShardingGroup:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "a model whose parameters are shared by replicas cannot be pickled: save its state_dict(), or a checkpoint "
            "of the job"
        )


def is_run(how: Cut) -> bool:
    """True if the shares of a tensor that is cut so stand behind each other in the whole's memory.

    >>> is_run(Cut(0, (8,), (8, 3))), is_run(Cut(1, (8,), (3, 8)))
    (True, False)
    """
    return len(how.blocks) == 1 and all(length == 1 for length in how.shape[: how.dim])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
