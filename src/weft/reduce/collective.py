"""The port between the reducer and the algorithms: a sum over ranks that can be in flight while others are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Return when the result is there (on CUDA: when the current stream waits for it); raise if it failed."""


@runtime_checkable
class Collective(Protocol):
    """Sums over the ranks of one group. Every rank makes the same calls in the same order."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, flat: torch.Tensor) -> Work:
        """Start to replace ``flat`` (1-D, dense, contiguous, the same numel and dtype on every rank) by its sum over
        the ranks, in its own dtype; ``flat`` belongs to the collective until the work has been waited for."""

    def close(self) -> None:
        """Give back what it holds; nothing is in flight."""


@runtime_checkable
class SumsPieces(Protocol):
    """A collective that also sums tensors where they are."""

    def sum_pieces(self, tensors: Sequence[torch.Tensor], scale: float) -> Work:
        """Start to replace each tensor (1-D, dense, contiguous, all of one dtype, of the same sizes in order on every
        rank) by the sum over the ranks of ``scale`` times it; they belong to the collective until the work is done."""


class Direct:
    """The backend's own all-reduce over a process group (NCCL's ring or tree on CUDA, gloo's on the CPU).

    The group is the caller's: ``close`` leaves it alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, flat: torch.Tensor) -> Work:
        work = dist.all_reduce(flat, dist.ReduceOp.SUM, group=self.group, async_op=True)
        assert work is not None  # a rank outside the group has no business here
        return work

    def close(self) -> None:
        """Nothing is held."""
