"""Pieces of sharded tensors: where the model would write into one and be lost, that is an error.

In one process ``h[:, 0]`` is a view, and ``h[:, 0].zero_()`` writes into ``h``. Where ``h`` is sharded along that dim
the piece is of another rank, so every rank has a copy of it. The search for layouts sees such a write, and keeps ``h``
whole; here are those that only a later step does. A piece is noted at the memory of the shard, which all views of the
shard share, and looked at when the shard is used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.errors import UsageError
from weft.torch.pytorch.private import base_of, has_memory, no_torch_function, storage_key
from weft.torch.pytorch.torch_functions import named
from weft.torch.tensors.marks import PIECES, unwritten

_TAKING = {
    Tensor.__getitem__,
    *named(
        (torch, Tensor),
        ("select", "narrow", "unbind", "split", "split_with_sizes", "chunk", "tensor_split", "diagonal"),
    ),
}
"""Functions whose results are views; in inference mode PyTorch does not say which are."""


class Piece(NamedTuple):
    """A view of a copy of the whole, the question if it was written since, and the function that took it."""

    view: weakref.ref[Tensor]
    unwritten: Callable[[], bool]
    name: str


def note_pieces(shard: DTensor, found: Iterable[Tensor], name: str) -> None:
    """Note views of a copy of a shard's whole. ``name``: of the function that gave them."""
    for each in found:
        # not the piece itself, which would live as long as the shard; both count writes together
        other = own_part(each) if each.is_inference() else each.detach()
        _noted(shard, make=True).append(Piece(weakref.ref(each), unwritten(other), name))


def pass_on(copy: DTensor, shard: DTensor) -> None:
    """Note pieces of a copy as those of the shard."""
    _noted(shard, make=True).extend(_noted(copy))


def check_pieces(shard: DTensor, written: bool = False) -> None:
    """Refuse a shard of which a piece was written. ``written``: the shard is about to be, so no piece may be left.

    Raises:
        UsageError: One of both was written, which the other does not see.
    """
    pieces = _noted(shard)
    if any(each.view() is shard for each in pieces):
        return  # a piece itself: it is the shard behind it that may not be used again
    for each in pieces:
        if not each.unwritten() or (written and each.view() is not None):
            raise UsageError(
                f"{each.name} has taken a piece of a tensor that ranks share, and the model writes into one of both, "
                "which the other would not see: write into copies (x.clone()), or do that in the first step too, after "
                "which the tensor stays whole"
            )


def local_of(shard: DTensor) -> Tensor:
    """This rank's part, of which no piece was written."""
    check_pieces(shard)
    return shard.to_local()


def is_copied(result: Tensor, part: DTensor, func: Any) -> bool:
    """True if a result is a view in one process, and a copy of what all ranks have gathered here."""
    if not isinstance(result, DTensor) or result is part:
        return False
    with no_torch_function():
        base, below = base_of(result), base_of(part)
    is_view = (
        func in _TAKING if result.is_inference() else base is not None and (base is part or base is below)
    )
    return is_view and not share_memory(result, part)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """True if two tensors, or this rank's parts of them, lie in the same memory."""
    mine, theirs = own_part(one), own_part(other)
    return has_memory(mine) and has_memory(theirs) and storage_key(mine) == storage_key(theirs)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, without a graph; another tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with no_torch_function(), torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


def _noted(shard: Tensor, make: bool = False) -> list[Piece]:
    """The pieces that were noted at the memory of a shard."""
    local = own_part(shard)
    held = vars(local.untyped_storage()) if has_memory(local) else {}
    found: list[Piece] = held.setdefault(PIECES, []) if make else held.get(PIECES, [])
    return found
