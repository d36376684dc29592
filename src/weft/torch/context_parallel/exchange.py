"""What ranks that share sequences exchange: parts of a whole tensor, the whole of parts, and keys for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from weft.torch.pytorch.private import keeps_as_ever
from weft.torch.tensor_parallel.rules import shard_of
from weft.torch.tensor_parallel.spread import Narrowed, Together, plain
from weft.torch.tensor_parallel.team import Quiet, Team
from weft.torch.tensors.places import sizes_of


def can_cut(total: int, ranks: int) -> bool:
    """True if every rank gets positions."""
    return sizes_of(total, ranks)[-1] > 0


def own(whole: Tensor, dim: int, team: Team) -> Tensor:
    """This rank's positions of a whole tensor."""
    return team.places(whole.shape[dim]).own(whole, dim, team.rank)


class _Share(Quiet):
    """Part to whole, for what each rank uses in another way, keys say: the gradients of all are added up."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, total: int, team: Team) -> Tensor:
        ctx.dim, ctx.team = dim, team
        return _gathered(part, dim, total, team)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        team, places = ctx.team, ctx.team.places(gradient.shape[ctx.dim])
        return team.add_up_parts(gradient, ctx.dim, places), None, None, None


def _gathered(part: Tensor, dim: int, total: int, team: Team) -> Tensor:
    return team.whole_of(part, dim, team.places(total))


def in_parts(local: Tensor, dim: int, total: int, team: Team) -> DTensor:
    """The ranks' tensors as one, with ``total`` positions along ``dim``."""
    dim %= local.ndim
    shape = torch.Size([*local.shape[:dim], total, *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, team.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def like(local: Tensor, given: DTensor, team: Team) -> DTensor:
    """A tensor in the parts that ``team`` has of ``given``, also where these are samples and positions seen as one
    dimension."""
    sizes, placements = list(local.shape), given.placements[: team.mesh.ndim]
    for placement in placements:
        dim = placement.dim  # type: ignore[attr-defined]
        sizes[dim] = given.shape[dim]
    shape = torch.Size(sizes)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, team.mesh, placements, run_check=False, shape=shape, stride=stride)


def cut(whole: Tensor, dim: int, team: Team) -> DTensor:
    """A whole tensor, equal on all ranks, in parts along ``dim``."""
    part: Tensor = Narrowed.apply(plain(whole), team, dim, team.places(whole.shape[dim]))
    return in_parts(part, dim, whole.shape[dim], team)


def gather(tensor: DTensor, team: Team) -> Tensor:
    """The whole of a tensor in parts, for what every rank computes alike."""
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    whole: Tensor = Together.apply(tensor.to_local(), team, dim, team.places(tensor.shape[dim]))
    return whole


class KeptInParts:
    """Inside, of gathered tensors autograd keeps this rank's part: the backward pass gathers them again.

    Where somebody else says how tensors are kept (activation checkpoints, say), nothing changes.
    """

    def __init__(self, team: Team, *pairs: tuple[Tensor, Tensor]) -> None:
        """``pairs``: tensors in parts, and the whole ones that :func:`share` gave for them."""
        self._team = team
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


def share(tensor: DTensor, team: Team) -> Tensor:
    """The whole of a tensor in parts, of which each rank makes something of its own."""
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    whole: Tensor = _Share.apply(tensor.to_local(), dim, tensor.shape[dim], team)
    return whole
