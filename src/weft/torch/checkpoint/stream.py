"""Whole weights of a split model for an inference engine: bucket by bucket, so that no rank holds the whole model.

plan      the weights in the order of the state, in buckets           the same on every rank
pack      a partition's weights of one bucket, whole, in one tensor   collective over those that hold parts
hand over that tensor to the rank that yields                         from the partition that has it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint.agree import check_same_call
from weft.errors import DivergenceError, UsageError
from weft.torch.calls.placeholders import kind_of
from weft.torch.checkpoint.adapters import ADVICE, Merged, merged_names
from weft.torch.checkpoint.named_state import owner_of, pipeline_position
from weft.torch.model import DistributedModel
from weft.torch.replicas.full_tensors import full_tensor
from weft.torch.session import current
from weft.torch.session.collectives import gather_texts
from weft.torch.session.session import Session
from weft.torch.tensors.pytree import is_wrapped, made_like, plain_tensors_of
from weft.torch.tensors.state_names import whole_shape

CALL = "stream_weights"
ENDED, END = "ended before the last weight", "after the last weight"
ALIGNED_BYTES = 16
"""The largest element of a tensor; each begins at a multiple of it."""


def stream_weights(
    model: DistributedModel,
    bucket_bytes: int = 256 << 20,
    *,
    dtype: torch.dtype | None = None,
    every_rank: bool = False,
    tied_names: bool = False,
    merge_adapters: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Name and full tensor of each weight, as ``load_weights`` of an inference engine takes them; collective.

    Every rank calls this after the first step, outside of steps, and goes through it to the end. Names are those of
    the model before it was split. Tensors are copies, whole, on this rank's device. A rank holds what it owns, the
    bucket in use and the one that comes.

    Args:
        model: The model.
        bucket_bytes: Of so many bytes of weights full tensors are made at a time; a larger weight is alone.
        dtype: Floating-point weights in this dtype; None: each in its own.
        every_rank: Every rank yields all weights. Otherwise the first rank of each replica, and the others nothing.
        tied_names: A tensor with several names comes with each of them. Otherwise once, with the first one, as in
            ``named_parameters()``.
        merge_adapters: Of a model with LoRA adapters of PEFT come the weights with the active adapters added, with
            their names in the model without adapters. Otherwise the weights and the adapters, with their own names.

    Raises:
        UsageError: In a step; before the split; not called on every rank, or not to its end; an adapter that is not
            the sum of a weight and what LoRA adds. On every rank.
        DivergenceError: Ranks passed other arguments, or do something else meanwhile.
    """
    if not isinstance(model, DistributedModel):
        raise UsageError(f"model is a {type(model).__qualname__}: pass the DistributedModel")
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise UsageError(f"bucket_bytes is {bucket_bytes!r}: write a number of bytes, 256 << 20 say")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(
            f"dtype is {dtype!r}: write one of floating-point numbers, torch.bfloat16 say, or None"
        )
    session = current.session()
    session.check_outside(f"{CALL}()")
    model.need_partition(f"{CALL}()")
    buckets = _buckets(_weights(model, dtype, tied_names, merge_adapters), bucket_bytes)
    options = [bucket_bytes, str(dtype), every_rank, tied_names, merge_adapters]
    return iter(()) if session.rehearsal is not None else _stream(session, buckets, every_rank, options)


class Part(NamedTuple):
    """A plain tensor of a weight, whole. ``offset``: where it begins in what its partition has of the bucket."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, packed: Tensor) -> Tensor:
        """The tensor, in the memory of the bucket."""
        return packed[self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Weight:
    """A weight of the model.

    Attributes:
        names: Those that it is yielded with.
        tensor: As this rank has it: all, its part, or a placeholder.
        owner: The partition that has it.
        dtype: What it is converted to; None: it stays.
        merged: What an adapter adds to it.
    """

    names: list[str]
    tensor: Tensor
    owner: int
    dtype: torch.dtype | None
    merged: Merged | None

    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the whole; of several tensors, if it is made of others."""
        if is_wrapped(self.tensor):
            return [(tuple(part.shape), part.dtype) for part in plain_tensors_of(self.tensor)]
        return [(whole_shape(self.tensor), self.dtype or self.tensor.dtype)]

    def values(self) -> list[Tensor]:
        """The same, with values, on the ranks of the partition; collective over those that hold parts."""
        whole = full_tensor(self.tensor.detach(), self.tensor)
        if self.merged is not None:
            whole = self.merged.add_to(whole)
        return [*plain_tensors_of(whole)]

    def made_of(self, values: Sequence[Tensor]) -> Tensor:
        """The weight from its values."""
        return (
            made_like(self.tensor, kind_of(self.tensor), iter(values))
            if is_wrapped(self.tensor)
            else values[0]
        )


Bucket = list[tuple[Weight, list[Part]]]


def _weights(
    model: DistributedModel, dtype: torch.dtype | None, tied_names: bool, merge_adapters: bool
) -> list[Weight]:
    """The tensors of the model's state, in its order."""
    merged = merged_names(model) if merge_adapters else None
    found: dict[int, Weight] = {}
    for own, tensor in model.module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or (merged is not None and own not in merged):
            continue
        name, adapter = (own, None) if merged is None else merged[own]
        if id(tensor) not in found:
            converted = dtype if tensor.is_floating_point() and not is_wrapped(tensor) else None
            found[id(tensor)] = Weight([name], tensor, owner_of(model, own), converted, adapter)
            continue
        tied = found[id(tensor)]
        if tied.merged != adapter:
            raise UsageError(
                f"{tied.names[0]} and {name} are one tensor, and only one of them has an adapter, so they differ when "
                f"it is added: {ADVICE}"
            )
        if tied_names:
            tied.names.append(name)
    return [*found.values()]


def _buckets(weights: Sequence[Weight], most_bytes: int) -> list[Bucket]:
    """Weights that are made whole together, and where in what their partition hands over each one is."""
    buckets: list[Bucket] = []
    size_bytes = most_bytes
    ends: dict[int, int] = {}
    for weight in weights:
        shapes = weight.shapes()
        added = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)
        if not buckets or size_bytes + added > most_bytes:
            buckets.append([])
            size_bytes, ends = 0, {}
        size_bytes += added
        parts = []
        for shape, dtype in shapes:
            begin = -(-ends.get(weight.owner, 0) // ALIGNED_BYTES) * ALIGNED_BYTES
            parts.append(Part(begin, shape, dtype))
            ends[weight.owner] = parts[-1].end
        buckets[-1].append((weight, parts))
    return buckets


def _stream(
    session: Session, buckets: Sequence[Bucket], every_rank: bool, options: Sequence[Any]
) -> Iterator[tuple[str, Tensor]]:
    check_same_call(session, CALL, None)
    _meet(session, json.dumps(options))
    for number, bucket in enumerate(buckets):
        _meet(session, f"bucket {number}")
        found = _whole(session, bucket, every_rank)
        while found:
            names, tensor = found.pop(0)
            try:
                for name in names:
                    yield name, tensor
            except GeneratorExit:
                _meet(session, ENDED)
                raise
            del tensor
    _meet(session, END)


def _meet(session: Session, mine: str) -> None:
    """Wait for all ranks, which do the same next.

    Raises:
        UsageError: A rank has ended its loop.
        DivergenceError: A rank does something else.
    """
    with session.doing(f"{CALL}()"):
        texts = gather_texts(mine, session.group("world"))
    ended = [rank for rank, text in enumerate(texts) if text == ENDED]
    if (
        len({*texts}) == 1 or mine == ENDED or {*texts} == {END, ENDED}
    ):  # one that has left at the last weight
        return
    if ended:
        raise UsageError(
            f"rank {', '.join(map(str, ended))} ended its loop over {CALL}() before the last weight: let every rank "
            "go through it to the end"
        )
    each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
    raise DivergenceError(
        f"the ranks call {CALL}() with other arguments, or do other things meanwhile: {each}"
    )


@torch.no_grad()
def _whole(session: Session, bucket: Bucket, every_rank: bool) -> list[tuple[list[str], Tensor]]:
    """Names and weights of a bucket where they are yielded; nothing elsewhere."""
    here = pipeline_position(session)
    yields = every_rank or (here == 0 and session.position("tp") == 0)
    handed: dict[int, Tensor] = {}
    with session.doing(f"{CALL}()"):
        for owner in sorted({weight.owner for weight, _ in bucket}):
            mine = [each for each in bucket if each[0].owner == owner]
            packed = _packed(session, mine) if owner == here else None
            packed = _handed_over(session, mine, packed, owner, every_rank)
            if yields and packed is not None:
                handed[owner] = packed
    if not yields:
        return []
    return [
        (weight.names, weight.made_of([part.of(handed[weight.owner]) for part in parts]))
        for weight, parts in bucket
    ]


def _size_bytes(bucket: Bucket) -> int:
    return max(parts[-1].end for _, parts in bucket)


def _packed(session: Session, bucket: Bucket) -> Tensor:
    """All of this partition's weights in a bucket, as bytes."""
    packed = torch.empty(_size_bytes(bucket), dtype=torch.uint8, device=session.device)
    for weight, parts in bucket:
        for part, value in zip(parts, weight.values(), strict=True):
            part.of(packed).copy_(value)
    return packed


def _handed_over(
    session: Session, bucket: Bucket, packed: Tensor | None, owner: int, every_rank: bool
) -> Tensor | None:
    """The weights of partition ``owner``, which has ``packed`` them, on the ranks that yield them."""
    ranks, group, here = session.peers("pp"), session.group("pp"), pipeline_position(session)
    size_bytes = _size_bytes(bucket)
    if len(ranks) == 1 or not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device=session.device) if packed is None else packed
    if every_rank:
        content = torch.empty(size_bytes, dtype=torch.uint8) if packed is None else packed.cpu()
        dist.broadcast(content, ranks[owner], group=group)
        return content.to(session.device) if packed is None else packed
    if owner == 0 or session.position("tp"):
        return packed
    if packed is not None:
        dist.send(packed.cpu(), ranks[0], group=group)
    elif here == 0:
        content = torch.empty(size_bytes, dtype=torch.uint8)
        dist.recv(content, ranks[owner], group=group)
        return content.to(session.device)
    return packed
