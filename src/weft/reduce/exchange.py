"""Calls of a process group beyond a sum, for algorithms and compressors: pieces of all ranks, and new groups."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from weft.errors import UsageError
from weft.reduce.collective import Collective, Direct
from weft.transport.private_c10d import default_store, nccl_options, use_backend

# PyTorch 2.13 renamed them, and warns of the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


EXTREMES = (dist.ReduceOp.MAX, dist.ReduceOp.MIN)


def gather_rows(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``flat`` of every rank of a group, in the order of the ranks: shape (ranks, numel)."""
    found = flat.new_empty(group.size() * flat.numel())
    _gather(found, flat.contiguous(), group=group)
    return found.view(-1, flat.numel())


def all_reduce_extreme(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """Write into ``tensor`` the largest (``MAX``) or smallest (``MIN``) number of the ranks at each place.

    As ``torch.amax`` and ``torch.amin`` do it for one process, a place where a rank has NaN becomes NaN. gloo compares
    with ``<``, which is false for NaN: whether one is kept there depends on which rank has it.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        op: ``ReduceOp.MAX`` or ``ReduceOp.MIN``.
        group: The ranks.
    """
    if not tensor.is_floating_point():
        dist.all_reduce(tensor, op, group=group)
        return
    marked = mark_nan(tensor, op)
    dist.all_reduce(marked, op, group=group)
    tensor.copy_(nan_where_marked(marked))


def mark_nan(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Numbers that a comparison keeps: ``tensor`` without NaN, and beside it marks where it has some."""
    sign = 1.0 if op == dist.ReduceOp.MAX else -1.0
    nan = tensor.isnan()
    return torch.stack([tensor.masked_fill(nan, -sign * torch.inf), nan * torch.full_like(tensor, sign)])


def nan_where_marked(marked: torch.Tensor) -> torch.Tensor:
    """The numbers that :func:`mark_nan` has taken apart, once they are reduced."""
    return marked[0].masked_fill(marked[1] != 0, torch.nan)


def sum_of_own_shard(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over a group of this rank's of equal shards of ``flat``."""
    found = flat.new_empty(flat.numel() // group.size())
    _scatter(found, flat, group=group)
    return found


@runtime_checkable
class Exchange(Collective, Protocol):
    """A collective whose ranks can also swap pieces; these calls return when the result is there (on CUDA: queued)."""

    @property
    def rank(self) -> int:
        """This rank's place among ``size``."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group below."""

    def all_gather(self, flat: torch.Tensor) -> torch.Tensor:
        """``flat`` of every rank, in the order of the ranks: shape (size, numel)."""

    def all_to_all(self, flat: torch.Tensor) -> torch.Tensor:
        """Row i of ``flat``, shape (size, ...), goes to rank i: what came from each rank, in the same shape."""


class GroupExchange(Direct):
    """``Exchange`` over a process group."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def all_gather(self, flat: torch.Tensor) -> torch.Tensor:
        return gather_rows(flat, self.group)

    def all_to_all(self, flat: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(flat)
        dist.all_to_all_single(found, flat, group=self.group)
        return found


def exchange(collective: Collective) -> Exchange:
    """The collective itself if it can exchange, else an exchange over its process group.

    Raises:
        UsageError: It can do neither.
    """
    if isinstance(collective, Exchange):
        return collective
    group = getattr(collective, "group", None)
    if group is None:
        raise UsageError(
            f"{type(collective).__name__} has no process group, and this compression needs one: "
            "make it with weft.reduce.choice.choose"
        )
    return GroupExchange(group)


def subgroup(
    group: dist.ProcessGroup, members: Sequence[int], device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """A group of this rank and others, with gloo for the CPU or NCCL for a GPU, made by these ranks alone.

    ``torch.distributed.new_group`` takes every rank of the job, or, with ``use_local_synchronization``, names a group
    by how many groups a rank has: ranks that had unequally many never meet, and a group made again meets the old one's
    addresses. Here the name is a fresh one that the ranks agree on.

    Every rank of ``group`` calls it, each with the members (ranks in ``group``, ascending) of its own new group.
    """
    own = torch.tensor([secrets.randbits(62), secrets.randbits(62)], device=device)
    agreed = gather_rows(own, group)[0].tolist()
    name = f"weft/{agreed[0]:x}{agreed[1]:x}/{'-'.join(map(str, members))}"
    store = dist.PrefixStore(name, default_store())
    rank, size = list(members).index(group.rank()), len(members)
    made = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
        use_backend(made, device, kinds.NCCL, nccl)
    else:
        use_backend(made, device, kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout))
    return made
