"""Tensors of which each rank has a shard: whoever makes such a class says how its tensors are gathered.

The layers below know no more of them, so that the execution of a step needs nothing of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_all_gathers: dict[type[Tensor], Callable[[Tensor], Tensor]] = {}


def register(kind: type[Tensor], all_gather: Callable[[Tensor], Tensor]) -> None:
    """Let :func:`gathered` call ``all_gather`` for tensors of a class. It returns a plain tensor, alike everywhere."""
    _all_gathers[kind] = all_gather


def is_shard(tensor: Tensor) -> bool:
    """True if the tensor is of a class whose tensors are shards."""
    return type(tensor) in _all_gathers


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a shard; all ranks that have one call this together. Any other tensor is returned as it is."""
    all_gather = _all_gathers.get(type(tensor))
    return tensor if all_gather is None else all_gather(tensor)
