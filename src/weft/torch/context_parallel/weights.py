"""Weights that positions of several ranks use: whole on each, with gradients that are all-reduced, once a step.

in a step         each rank sums the gradients of its positions, over all microbatches
at its end        the ranks' sums are all-reduced, and become gradients as autograd makes them
at once           gradients that somebody asks for (``torch.autograd.grad``), or for which the script has hooks
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from weft.torch.backward.autograd import accumulates, run_autograd, unwatched
from weft.torch.tensor_parallel.shard_group import ShardGroup, enter, new_name
from weft.torch.tensors.shards import ShardPositions

from .zigzag import fits_zigzag, zigzag

BUCKET_BYTES = 25 << 20
_TELLS = "grad_placements" in inspect.signature(DTensor.from_local).parameters


class ContextGroup(ShardGroup):
    """The ranks that share sequences.

    Attributes:
        balanced: Whether positions are in zigzag blocks, and not in one block for each rank.
        waits: Whether gradients of weights wait for :meth:`add_up_weights`.
        attention: The setting ``context_parallel_attention``.
        further: The same ranks, for tensors that are sharded along heads as well.
    """

    remedy = "ask for it in the first step, too: then it is all-gathered behind the module that gives it"

    def __init__(
        self,
        mesh: DeviceMesh,
        group: Any,
        rank: int,
        size: int,
        collectives: Any = None,
        balanced: bool = False,
    ) -> None:
        super().__init__(mesh, group, rank, size, collectives)
        self.balanced, self.waits, self.attention = balanced, False, "auto"
        self.further: list[ContextGroup] = []
        self._zigzag: ContextGroup | None = None
        self._sums: dict[int, Tensor] = {}

    def use_zigzag(self) -> None:
        """From now on lengths that make enough blocks are cut in zigzag blocks."""
        mesh = DeviceMesh.from_group(self.group, self.mesh.device_type, mesh_dim_names=(new_name(),))
        self._zigzag = ContextGroup(mesh, self.group, self.rank, self.size, self.collectives, True)
        self._zigzag._sums, self._zigzag.attention = self._sums, self.attention

    def orders(self) -> list[ContextGroup]:
        """These ranks in each order in which they take positions."""
        return [self] if self._zigzag is None else [self, self._zigzag]

    def for_length(self, total: int) -> ContextGroup:
        """These ranks in the order for sequences of so many positions."""
        return self._zigzag if self._zigzag is not None and fits_zigzag(total, self.size) else self

    def positions(self, total: int) -> ShardPositions:
        return zigzag(total, self.size) if self.balanced else super().positions(total)

    def uses(self, full: Tensor) -> Tensor:
        if (
            self.waits
            and full.requires_grad
            and isinstance(full, nn.Parameter)  # a tensor that stands for one passes its gradient on at once
            and unwatched(full)  # a script's hook gets the gradient of each microbatch
            and torch.is_grad_enabled()
        ):
            result: Tensor = _Used.apply(full, self)
            return result
        return enter(full, self)

    def along_positions(self, tensor: DTensor) -> DTensor:
        """A sharded tensor along its positions only."""
        return tensor

    def keep(self, weight: Tensor, gradient: Tensor) -> None:
        """Add a gradient of this rank's positions to those that it has."""
        before = self._sums.get(id(weight))
        self._sums[id(weight)] = gradient if before is None else before + gradient

    def all_reduce_weights(self, weights: Iterable[Tensor]) -> None:
        """Give weights the gradients of all ranks' positions; collective over these, with the same weights."""
        for bucket in _buckets([weight for weight in weights if id(weight) in self._sums]):
            sums = [self._sums.pop(id(weight)) for weight in bucket]
            flat = self.all_reduce(torch.cat([each.flatten() for each in sums]))
            shards = flat.split([each.numel() for each in sums])
            run_autograd(bucket, [shard.view(each.shape) for shard, each in zip(shards, sums, strict=True)])


def _buckets(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Weights of one kind together, so many that messages are large."""
    kinds: dict[Any, list[Tensor]] = {}
    for weight in weights:
        kinds.setdefault((weight.dtype, weight.device), []).append(weight)
    for same in kinds.values():
        bucket: list[Tensor] = []
        for weight in same:
            if bucket and sum(each.nbytes for each in (*bucket, weight)) > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(weight)
        yield bucket


class _Used(torch.autograd.Function):
    """A weight on its way to this rank's positions."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shard_group: ContextGroup) -> Tensor:
        ctx.weight, ctx.shard_group = weight, shard_group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        if accumulates() and not torch.is_grad_enabled():
            ctx.shard_group.keep(ctx.weight, gradient)
            return None, None
        with torch.no_grad():
            return ctx.shard_group.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


def used(tensor: Tensor, shard_group: ShardGroup) -> Tensor:
    """A full tensor, equal on all ranks, for positions of this one: the gradients of all are all-reduced."""
    return shard_group.uses(tensor)


def used_replicated(tensor: Tensor, shard_group: ShardGroup) -> Tensor:
    """The same for PyTorch's own rules, which add up by themselves what is no weight of features."""
    if not (_TELLS and isinstance(tensor, nn.Parameter) and tensor.ndim == 1):
        return DTensor.from_local(tensor, shard_group.mesh, [Replicate()], run_check=False)
    return DTensor.from_local(
        used(tensor, shard_group),
        shard_group.mesh,
        [Replicate()],
        run_check=False,
        grad_placements=[Partial()],
    )
