"""Exchanges between ranks that share sequences: shards of a full tensor, the full tensor of shards, and keys for
all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from weft.torch.pytorch.private import keeps_as_ever
from weft.torch.tensor_parallel.pieces import local_of
from weft.torch.tensor_parallel.rules import Unsplittable, shard_of
from weft.torch.tensor_parallel.shard_group import Quiet, ShardGroup
from weft.torch.tensor_parallel.sharded_activations import AllGathered, Narrowed, plain
from weft.torch.tensors.marks import WINDOW
from weft.torch.tensors.shards import sizes_of


def can_cut(total: int, ranks: int) -> bool:
    """True if every rank gets positions."""
    return sizes_of(total, ranks)[-1] > 0


def own(full: Tensor, dim: int, shard_group: ShardGroup) -> Tensor:
    """This rank's positions of a full tensor."""
    return shard_group.positions(full.shape[dim]).own(full, dim, shard_group.rank)


class Share(Quiet):
    """Shard to full tensor, for what each rank uses in another way, keys say: gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, total: int, shard_group: ShardGroup) -> Tensor:
        ctx.dim, ctx.shard_group = dim, shard_group
        return _gathered(shard, dim, total, shard_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shard_group, positions = ctx.shard_group, ctx.shard_group.positions(gradient.shape[ctx.dim])
        return shard_group.reduce_scatter(gradient, ctx.dim, positions), None, None, None


def _gathered(shard: Tensor, dim: int, total: int, shard_group: ShardGroup) -> Tensor:
    return shard_group.full_tensor(shard, dim, shard_group.positions(total))


def sharded(local: Tensor, dim: int, total: int, shard_group: ShardGroup) -> DTensor:
    """The ranks' tensors as one, with ``total`` positions along ``dim``."""
    dim %= local.ndim
    shape = torch.Size([*local.shape[:dim], total, *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, shard_group.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
    )


def like(local: Tensor, given: DTensor, shard_group: ShardGroup) -> DTensor:
    """A tensor in the parts that ``group`` has of ``given``, also where these are samples and positions seen as one
    dimension.

    Raises:
        Unsplittable: It is still to be computed.
    """
    if getattr(given, WINDOW) is not None:
        raise Unsplittable("takes some positions")
    sizes, placements = list(local.shape), given.placements[: shard_group.mesh.ndim]
    for placement in placements:
        dim = placement.dim  # type: ignore[attr-defined]
        sizes[dim] = given.shape[dim]
    shape = torch.Size(sizes)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, shard_group.mesh, placements, run_check=False, shape=shape, stride=stride
    )


def cut(full: Tensor, dim: int, shard_group: ShardGroup) -> DTensor:
    """A full tensor, equal on all ranks, sharded along ``dim``."""
    shard: Tensor = Narrowed.apply(plain(full), shard_group, dim, shard_group.positions(full.shape[dim]))
    return sharded(shard, dim, full.shape[dim], shard_group)


def gather(tensor: DTensor, shard_group: ShardGroup) -> Tensor:
    """The full tensor of a sharded one, for what every rank computes alike."""
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    full: Tensor = AllGathered.apply(
        local_of(tensor), shard_group, dim, shard_group.positions(tensor.shape[dim])
    )
    return full


class KeptSharded:
    """Inside, of gathered tensors autograd keeps this rank's part: the backward pass gathers them again.

    Where somebody else says how tensors are kept (activation checkpoints, say), nothing changes.
    """

    def __init__(self, shard_group: ShardGroup, *pairs: tuple[Tensor, Tensor]) -> None:
        """``pairs``: sharded tensors, and the whole ones that :func:`share` gave for them."""
        self._team = shard_group
        self._shards = {
            full.untyped_storage().data_ptr(): (given.to_local().detach(), shard_of(given) or 0, full.shape)
            for given, full in pairs
            if isinstance(given, DTensor)
        }
        self._uses: dict[int, int] = {}
        self._again: dict[int, tuple[int, Tensor]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._active = bool(self._shards) and torch.is_grad_enabled() and keeps_as_ever()

    def __enter__(self) -> None:
        if self._active:
            self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._active:
            self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        key = tensor.untyped_storage().data_ptr()
        if key not in self._shards:
            return tensor.detach()  # a result itself would keep its own graph alive
        self._uses[key] = self._uses.get(key, 0) + 1
        return key, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        key, *seen = kept
        left, full = self._again.pop(key, (self._uses[key], None))
        if full is None:
            shard, dim, shape = self._shards[key]
            full = _gathered(shard, dim, shape[dim], self._team)
        if left > 1:  # attention of another piece of this rank's positions wants it, too
            self._again[key] = left - 1, full
        return full.as_strided(*seen)


def share(tensor: DTensor, shard_group: ShardGroup) -> Tensor:
    """The full tensor of a sharded one, of which each rank makes something of its own."""
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    full: Tensor = Share.apply(local_of(tensor), dim, tensor.shape[dim], shard_group)
    return full
