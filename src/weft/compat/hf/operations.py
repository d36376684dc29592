"""accelerate's functions over processes, ``accelerate.utils.gather`` and its like: they go over replicas.

accelerate believes in one process, since weft talks between the ranks. So its own functions give what one copy has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.communication import objects
from weft.compat.hf.ranks import gather_over_replicas, reduce_over_replicas
from weft.session.current import session
from weft.torch.tensors.pytree import map_tensors


def install(counts: Callable[[], bool]) -> None:
    """Change the functions wherever accelerate has them. ``counts``: whether processes are replicas now."""
    from accelerate import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        accelerator,
        utils,
    )
    from accelerate.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        operations,
    )

    for name, ours in _OURS.items():
        theirs = getattr(operations, name)
        new = _either(counts, ours, theirs)
        for module in (operations, utils, accelerator):
            if getattr(module, name, None) is theirs:
                setattr(module, name, new)


def _either(counts: Callable[[], bool], ours: Any, theirs: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if counts() else theirs)(*args, **kwargs)

    return call


def gather_object(object: list[Any]) -> list[Any]:
    """The lists of all copies as one."""
    return [each for part in objects.allgather(object, objects.RDP_GROUP) for each in part]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors that one copy has, in a structure of the same form."""

    def one(own: Tensor) -> Tensor:
        found: Tensor = objects.allgather(own.detach(), objects.RDP_GROUP)[from_process]
        return found.to(own.device)

    return map_tensors(tensor, one, attributes=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The list of the first rank of one copy, put into the list of every rank."""
    root = session().mesh.group("rdp", 0)[from_process]
    object_list[:] = objects.allgather(object_list, objects.WORLD)[root]
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The sum over all copies, or the mean; "none" leaves what is there."""
    if reduction == "none":
        return map_tensors(tensor, lambda each: each * scale, attributes=True)
    return reduce_over_replicas(tensor, reduction == "mean", scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """The tensors, as long along ``dim`` as the longest of all copies; what is new is ``pad_index``."""

    def one(own: Tensor) -> Tensor:
        if not -own.dim() <= dim < own.dim():
            return own
        sizes = objects.allgather(torch.tensor(own.shape[dim]), objects.RDP_GROUP)
        missing = max(map(int, sizes)) - own.shape[dim]
        if not missing:
            return own
        rest = own.new_full((*own.shape[:dim], missing, *own.shape[dim % own.dim() + 1 :]), pad_index)
        return torch.cat([rest, own] if pad_first else [own, rest], dim)

    return map_tensors(tensor, one, attributes=True)


_OURS: dict[str, Callable[..., Any]] = {
    "gather": gather_over_replicas,
    "gather_object": gather_object,
    "broadcast": broadcast,
    "broadcast_object_list": broadcast_object_list,
    "reduce": reduce,
    "pad_across_processes": pad_across_processes,
}
