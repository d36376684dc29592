"""Exchanges between ranks that share sequences: shards of a full tensor, the full tensor of shards, and keys for
all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from weft.torch.pytorch.private import keeps_as_ever
from weft.torch.tensor_parallel.rules import shard_of
from weft.torch.tensor_parallel.shard_group import Quiet, ShardGroup
from weft.torch.tensor_parallel.sharded_activations import Narrowed, Together, plain
from weft.torch.tensors.shard_positions import sizes_of


def can_cut(total: int, ranks: int) -> bool:
    """True if every rank gets positions."""
    return sizes_of(total, ranks)[-1] > 0


def own(whole: Tensor, dim: int, shard_group: ShardGroup) -> Tensor:
    """This rank's positions of a whole tensor."""
    return shard_group.places(whole.shape[dim]).own(whole, dim, shard_group.rank)


class _Share(Quiet):
    """Part to whole, for what each rank uses in another way, keys say: the gradients of all are added up."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, total: int, shard_group: ShardGroup) -> Tensor:
        ctx.dim, ctx.shard_group = dim, shard_group
        return _gathered(part, dim, total, shard_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shard_group, places = ctx.shard_group, ctx.shard_group.places(gradient.shape[ctx.dim])
        return shard_group.add_up_parts(gradient, ctx.dim, places), None, None, None


def _gathered(part: Tensor, dim: int, total: int, shard_group: ShardGroup) -> Tensor:
    return shard_group.whole_of(part, dim, shard_group.places(total))


def in_parts(local: Tensor, dim: int, total: int, shard_group: ShardGroup) -> DTensor:
    """The ranks' tensors as one, with ``total`` positions along ``dim``."""
    dim %= local.ndim
    shape = torch.Size([*local.shape[:dim], total, *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, shard_group.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
    )


def like(local: Tensor, given: DTensor, shard_group: ShardGroup) -> DTensor:
    """A tensor in the parts that ``group`` has of ``given``, also where these are samples and positions seen as one
    dimension."""
    sizes, placements = list(local.shape), given.placements[: shard_group.mesh.ndim]
    for placement in placements:
        dim = placement.dim  # type: ignore[attr-defined]
        sizes[dim] = given.shape[dim]
    shape = torch.Size(sizes)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, shard_group.mesh, placements, run_check=False, shape=shape, stride=stride
    )


def cut(whole: Tensor, dim: int, shard_group: ShardGroup) -> DTensor:
    """A whole tensor, equal on all ranks, in parts along ``dim``."""
    part: Tensor = Narrowed.apply(plain(whole), shard_group, dim, shard_group.places(whole.shape[dim]))
    return in_parts(part, dim, whole.shape[dim], shard_group)


def gather(tensor: DTensor, shard_group: ShardGroup) -> Tensor:
    """The whole of a tensor in parts, for what every rank computes alike."""
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    whole: Tensor = Together.apply(tensor.to_local(), shard_group, dim, shard_group.places(tensor.shape[dim]))
    return whole


class KeptInParts:
    """Inside, of gathered tensors autograd keeps this rank's part: the backward pass gathers them again.

    Where somebody else says how tensors are kept (activation checkpoints, say), nothing changes.
    """

    def __init__(self, shard_group: ShardGroup, *pairs: tuple[Tensor, Tensor]) -> None:
        """``pairs``: tensors in parts, and the whole ones that :func:`share` gave for them."""
        self._team = shard_group
        self._parts = {
            whole.untyped_storage().data_ptr(): (given.to_local().detach(), shard_of(given) or 0, whole.shape)
            for given, whole in pairs
            if isinstance(given, DTensor)
        }
        self._uses: dict[int, int] = {}
        self._again: dict[int, tuple[int, Tensor]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._active = bool(self._parts) and torch.is_grad_enabled() and keeps_as_ever()

    def __enter__(self) -> None:
        if self._active:
            self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._active:
            self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        key = tensor.untyped_storage().data_ptr()
        if key not in self._parts:
            return tensor.detach()  # a result itself would keep its own graph alive
        self._uses[key] = self._uses.get(key, 0) + 1
        return key, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        key, *seen = kept
        left, whole = self._again.pop(key, (self._uses[key], None))
        if whole is None:
            part, dim, shape = self._parts[key]
            whole = _gathered(part, dim, shape[dim], self._team)
        if left > 1:  # attention of another piece of this rank's positions wants it, too
            self._again[key] = left - 1, whole
        return whole.as_strided(*seen)


def share(tensor: DTensor, shard_group: ShardGroup) -> Tensor:
    """The whole of a tensor in parts, of which each rank makes something of its own."""
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    whole: Tensor = _Share.apply(tensor.to_local(), dim, tensor.shape[dim], shard_group)
    return whole
