"""Tensors of which each rank has a shard: whoever makes such a class says how its tensors are gathered.

The layers below know no more of them, so that the execution of a step needs nothing of tensor parallelism. There are
two kinds. A tensor may *stay* sharded until somebody gathers it, as a ``DTensor`` does. Or it gathers itself *on use*,
when a function takes it that has no rule for shards; until then it travels as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

AllGather = Callable[[Tensor], Tensor]
"""From a shard to a plain tensor, which is the same on each rank. All ranks that have a shard call it together."""
_stay: dict[type[Tensor], AllGather] = {}
_on_use: dict[type[Tensor], AllGather] = {}


def register(kind: type[Tensor], all_gather: AllGather, on_use: bool = False) -> None:
    """Let a class of tensors be known. ``on_use``: its tensors gather themselves when they are used."""
    (_on_use if on_use else _stay)[kind] = all_gather


def stays_sharded(tensor: Tensor) -> bool:
    """True if the tensor is a shard that does not gather itself."""
    return isinstance(tensor, tuple(_stay))


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor for which :func:`stays_sharded` is true."""
    return next(all_gather for kind, all_gather in _stay.items() if isinstance(tensor, kind))(tensor)


def used(tensor: Tensor) -> Tensor:
    """The whole of a shard that gathers itself on use. Any other tensor is returned as it is."""
    for kind, all_gather in _on_use.items():
        if isinstance(tensor, kind):
            return all_gather(tensor)
    return tensor
