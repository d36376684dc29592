"""What ranks that share sequences exchange: parts of a whole tensor, the whole of parts, and keys for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from weft.torch.pytorch.private import keeps_as_ever
from weft.torch.tensor_parallel.rules import shard_of
from weft.torch.tensor_parallel.team import Team


def sizes_of(total: int, ranks: int) -> list[int]:
    """How many positions each rank has of ``total``, as ``torch.chunk`` would cut them.

    >>> sizes_of(8, 2), sizes_of(7, 2), sizes_of(5, 4)
    ([4, 4], [4, 3], [2, 2, 1, 0])
    """
    most = -(-total // ranks)
    return [max(0, min(most, total - most * rank)) for rank in range(ranks)]


def can_cut(total: int, ranks: int) -> bool:
    """Whether every rank gets positions."""
    return sizes_of(total, ranks)[-1] > 0


def span(total: int, team: Team) -> tuple[int, int]:
    """The first of this rank's positions, and how many they are."""
    sizes = sizes_of(total, team.size)
    return sum(sizes[: team.rank]), sizes[team.rank]


def own(whole: Tensor, dim: int, team: Team) -> Tensor:
    """This rank's positions of a whole tensor, in the same memory."""
    return whole.narrow(dim, *span(whole.shape[dim], team))


class _Cut(torch.autograd.Function):
    """Whole to part; each rank has the gradient of its part, and all need the whole one."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, team: Team) -> Tensor:
        ctx.dim, ctx.team, ctx.total = dim, team, whole.shape[dim]
        return own(whole, dim, team).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, ctx.dim, ctx.total, ctx.team), None, None


class _Gather(torch.autograd.Function):
    """Part to whole, for what all ranks compute alike: the whole has the same gradient on each."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, total: int, team: Team) -> Tensor:
        ctx.dim, ctx.team = dim, team
        return _gathered(part, dim, total, team)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return own(gradient, ctx.dim, ctx.team).clone(), None, None, None


class _Share(_Gather):
    """Part to whole, for what each rank uses in another way, keys say: the gradients of all are added up."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        summed = ctx.team.add_up(gradient.clone(memory_format=torch.contiguous_format))
        return own(summed, ctx.dim, ctx.team).clone(), None, None, None


def _gathered(part: Tensor, dim: int, total: int, team: Team) -> Tensor:
    sizes = sizes_of(total, team.size)
    if team.group is None:  # ranks that are not there
        return torch.cat([part.narrow(dim, 0, size) for size in sizes], dim)
    return team.together(part, dim, sizes)


def in_parts(local: Tensor, dim: int, total: int, team: Team) -> DTensor:
    """The ranks' tensors as one, with ``total`` positions along ``dim``."""
    dim %= local.ndim
    shape = torch.Size([*local.shape[:dim], total, *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, team.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def like(local: Tensor, given: DTensor, team: Team) -> DTensor:
    """A tensor in the parts of ``given``, also where these are samples and positions seen as one dimension."""
    dim = given.placements[0].dim  # type: ignore[attr-defined]
    shape = torch.Size([*local.shape[:dim], given.shape[dim], *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, team.mesh, given.placements, run_check=False, shape=shape, stride=stride)


def cut(whole: Tensor, dim: int, team: Team) -> DTensor:
    """A whole tensor, equal on all ranks, in parts along ``dim``."""
    part: Tensor = _Cut.apply(whole, dim, team)
    return in_parts(part, dim, whole.shape[dim], team)


def gather(tensor: DTensor, team: Team) -> Tensor:
    """The whole of a tensor in parts, for what every rank computes alike."""
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    whole: Tensor = _Gather.apply(tensor.to_local(), dim, tensor.shape[dim], team)
    return whole


class KeptInParts:
    """Inside, of gathered tensors autograd keeps this rank's part: the backward pass gathers them again.

    Where somebody else says how tensors are kept (activation checkpoints, say), nothing changes.
    """

    def __init__(self, team: Team, *pairs: tuple[Tensor, Tensor]) -> None:
        """``pairs``: tensors in parts, and the whole ones that :func:`share` gave for them."""
        self._team = team
        self._parts = {
            whole.untyped_storage().data_ptr(): (given.to_local().detach(), shard_of(given), whole.shape)
            for given, whole in pairs
            if isinstance(given, DTensor)
        }
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._active = bool(self._parts) and torch.is_grad_enabled() and keeps_as_ever()

    def __enter__(self) -> None:
        if self._active:
            self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._active:
            self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        kept = self._parts.get(tensor.untyped_storage().data_ptr())
        if kept is None:
            return tensor
        return kept, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        (part, dim, shape), *seen = kept
        return _gathered(part, dim, shape[dim], self._team).as_strided(*seen)


def share(tensor: DTensor, team: Team) -> Tensor:
    """The whole of a tensor in parts, of which each rank makes something of its own."""
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    whole: Tensor = _Share.apply(tensor.to_local(), dim, tensor.shape[dim], team)
    return whole
