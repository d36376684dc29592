"""The ranks that hold the parts of one tensor, and what they do together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.errors import UsageError
from weft.reduce.exchange import all_reduce_extreme
from weft.reduce.shard_collectives import ShardCollectives
from weft.torch.pytorch.torch_functions import PLAIN_APPLY
from weft.torch.tensors.cut_weights import inside_unit
from weft.torch.tensors.shards import ShardPositions, sizes_of

_numbers = itertools.count()
ALL_GATHERS = "all-gathers a sharded tensor"
_shard_groups: WeakValueDictionary[str, ShardGroup] = WeakValueDictionary()


class ShardGroup:
    """The ranks of one group of axis ``tp``.

    A copied model has the same shard group: a copy of one is the group itself.

    Attributes:
        rank: This rank's number in the group.
        size: How many ranks the group has.
        mesh: The group as PyTorch's sharded tensors know it. Its name is no other mesh's: PyTorch takes meshes of
            equal names and ranks for one, also after the group of the first is gone.
        group: The group; None where the ranks are imagined, and sums are what this rank has.
        collectives: How the ranks exchange tensors; None where they are imagined.
        record: The context in which the ranks exchange something: a recording has a span of it.
        agree: Called with what the rank is about to do with the others where the script decides whether; an error
            where another rank does something else.
    """

    axis = "tp"
    remedy = "keep the module that gives it whole, weft.set_tensor_parallelism(module, False)"
    """What a script can do where a tensor of the group has to be whole."""

    def __init__(
        self, mesh: DeviceMesh, group: Any, rank: int, size: int, collectives: ShardCollectives | None = None
    ) -> None:
        self.mesh, self.group, self.rank, self.size, self.collectives = mesh, group, rank, size, collectives
        assert mesh.mesh_dim_names is not None
        self.name = mesh.mesh_dim_names[0]
        self.record: Callable[[], AbstractContextManager[None]] = nullcontext
        self.agree: Callable[[str], None] = _agreed
        _shard_groups[self.name] = self

    @classmethod
    def of(
        cls, group: Any, rank: int, size: int, device: torch.device, timeout: timedelta | None = None
    ) -> ShardGroup:
        """The shard group of a process group of ``torch.distributed``, all of whose ranks call this."""
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(new_name(),))
        collectives = ShardCollectives.connect(group, device, timeout)
        shard_group = cls(mesh, group, rank, size, collectives)
        finalize(shard_group, collectives.close).atexit = False
        return shard_group

    @property
    def seat(self) -> int:
        """A number of this rank's own among those with parts of a tensor, for random numbers."""
        return self.rank

    def positions(self, total: int) -> ShardPositions:
        """The positions that each rank has, of so many."""
        return ShardPositions.contiguous(sizes_of(total, self.size))

    def uses(self, full: Tensor) -> Tensor:
        """A tensor, equal on all ranks, of which each makes something of its own: its gradient is the sum of all."""
        return enter(full, self)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, written into the tensor, which is contiguous."""
        if self.collectives is not None:
            self._outside("all-reduces a sharded tensor")
            with self.record():
                self.collectives.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The largest number of the ranks' at each place, written into the tensor, which is contiguous."""
        if self.group is not None:
            self._outside("all-reduces a maximum")
            with self.record():
                all_reduce_extreme(tensor, dist.ReduceOp.MAX, self.group)
        return tensor

    def reduce_scatter(self, tensor: Tensor, along: int, positions: ShardPositions) -> Tensor:
        """This rank's shard, along a dimension, of the sum over the ranks (reduce-scatter)."""
        if len(set(positions.sizes)) > 1:
            summed = self.all_reduce(tensor.clone(memory_format=torch.contiguous_format))
            return positions.own(summed, along, self.rank).clone()
        if self.collectives is None:
            return tensor.narrow(along, 0, positions.sizes[0]).clone()
        if positions != ShardPositions.contiguous(positions.sizes):
            tensor = torch.cat([positions.own(tensor, along, rank) for rank in range(self.size)], along)
        self._outside("reduce-scatters a tensor")
        with self.record():
            return self.collectives.reduce_scatter(tensor, along % tensor.ndim)

    def noted(self, names: frozenset[str], what: str, how: str) -> None:
        """Nothing: only who finds out what may stay sharded takes notes, see ``sharded_activations.watch``."""

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """The tensors of all ranks, in their order; ``sizes``: how large each is along ``dim``."""
        if self.collectives is None:
            return [tensor.narrow(dim, 0, size) for size in sizes]
        full, most = self._padded(tensor, dim, max(sizes)), max(sizes)
        return [full.narrow(dim, rank * most, size) for rank, size in enumerate(sizes)]

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The tensors of all ranks behind each other along ``dim``; ``sizes``: how large each is there."""
        if self.collectives is None or min(sizes) < max(sizes):
            return torch.cat(self.gather(tensor, dim, sizes), dim)
        return self._padded(tensor, dim, max(sizes))

    def all_to_all(self, sent: Tensor) -> Tensor:
        """The rows that all ranks have for this one, of a tensor with a row for each rank."""
        if self.collectives is None:
            return sent
        self._outside("exchanges shards")
        with self.record():
            return self.collectives.all_to_all(sent)

    def full_tensor(self, shard: Tensor, dim: int, positions: ShardPositions) -> Tensor:
        """The whole of what the ranks have along ``dim``."""
        if positions == ShardPositions.contiguous(positions.sizes):
            return self.all_gather(shard, dim, positions.sizes)
        return positions.joined(self.gather(shard, dim, positions.sizes), dim)

    def _padded(self, tensor: Tensor, dim: int, size: int) -> Tensor:
        """The tensors of all ranks behind each other, each with as many zeros behind it as it lacks."""
        assert self.collectives is not None
        if tensor.shape[dim] < size:  # all send as much
            shape = list(tensor.shape)
            shape[dim] = size - tensor.shape[dim]
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
        self._outside(ALL_GATHERS)
        with self.record():
            return self.collectives.all_gather(tensor, dim % tensor.ndim)

    def _outside(self, what: str) -> None:
        """Between units the script's own code decides what is done; inside of them all ranks run the same."""
        if not inside_unit():
            self.agree(what)

    def __deepcopy__(self, memo: Any) -> ShardGroup:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "a model that is split over axis tp cannot be pickled: save its state_dict(), or a checkpoint of the job"
        )


def _agreed(what: str) -> None:
    """All do the same."""


def shard_group_of(shard: DTensor) -> ShardGroup | None:
    """The ranks that hold a sharded tensor; None if they are no group of weft's."""
    names = shard.device_mesh.mesh_dim_names
    return None if names is None else _shard_groups.get(names[0])


def exchanging(shard: DTensor) -> AbstractContextManager[None]:
    """The context in which PyTorch exchanges a sharded tensor."""
    shard_group = shard_group_of(shard)
    return nullcontext() if shard_group is None else shard_group.record()


def new_name() -> str:
    """A name for a mesh that no other mesh of this process has."""
    return f"weft-tp-{next(_numbers)}"


class Quiet(torch.autograd.Function):
    """A function of weft's own, which nobody intercepts: it may run while weft answers for a tensor between units."""

    apply = PLAIN_APPLY


class Enter(Quiet):
    """A full tensor on its way to the parts: each rank's gradient is that of its shard, so they are all-reduced."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, shard_group: ShardGroup) -> Tensor:
        ctx.shard_group = shard_group
        return full.view_as(full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shard_group.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class Leave(Quiet):
    """The parts' results on their way to a full tensor: they are all-reduced, and each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, shard_group: ShardGroup) -> Tensor:
        if not shard.is_contiguous():
            return shard_group.all_reduce(shard.contiguous())
        ctx.mark_dirty(shard)
        return shard_group.all_reduce(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def enter(full: Tensor, shard_group: ShardGroup) -> Tensor:
    """The tensor, whose gradient is the sum of the ranks'."""
    if torch.is_grad_enabled() and full.requires_grad:
        result: Tensor = Enter.apply(full, shard_group)
        return result
    return full


def leave(shard: Tensor, shard_group: ShardGroup) -> Tensor:
    """The sum of the ranks' tensors; ``part`` may be written."""
    result: Tensor = Leave.apply(shard, shard_group)
    return result
