"""PyTorch's functions on sharded tensors: weft's rules first, then PyTorch's own for ``DTensor``.

Every function with such a tensor among its arguments comes here first, on whatever thread and in whatever module.
weft has rules of its own for what would fail, would need messages between the ranks, or would draw the same random
numbers for different parts. What no rule covers is done with full tensors: slow, but what the model says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from weft.errors import DivergenceError, PeerError, StallError, UsageError
from weft.torch.pytorch.private import ENDS_A_CHECKPOINT
from weft.torch.pytorch.private_dtensor import take_plain_as_replicated_here
from weft.torch.pytorch.torch_functions import AUTOGRAD, METADATA, targets
from weft.torch.tensors.marks import BLOCKS
from weft.torch.tensors.pytree import map_arguments, tensors_in

from .pieces import check_pieces, is_copied, note_pieces, pass_on, share_memory
from .rules import RULES, Rule, Unsplittable, as_full_tensor, shards_in
from .shard_group import ALL_GATHERS, ShardGroup
from .sharded_activations import plain

log = logging.getLogger("weft")
FATAL: tuple[type[BaseException], ...] = (
    torch.OutOfMemoryError, dist.DistError, DivergenceError, PeerError, StallError, *ENDS_A_CHECKPOINT,
)  # fmt: skip
"""What full tensors would not help against, or what may come on one rank only."""
_functions: dict[str, Functions] = {}
_plain: Callable[..., Any] = DTensor.__torch_function__


class Functions:
    """Runs PyTorch's functions on tensors that are sharded over one group of ranks."""

    rules: Mapping[Any, Rule] = RULES
    """weft's own rules by function."""

    def __init__(self, shard_group: ShardGroup) -> None:
        self.shard_group = shard_group

    def __call__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_arguments((args, kwargs), plain)
        try:
            return self.on_shards(func, types, args, kwargs)
        except FATAL:
            raise
        except Exception as reason:
            return self.on_full_tensors(func, args, kwargs, reason)

    def on_shards(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result, each rank computing its part."""
        parts = shards_in(args, kwargs)
        if any(getattr(part, BLOCKS) is not None for part in parts):
            return RULES["blocks"](self.shard_group, func, args, kwargs)
        written = targets(func, args, kwargs)
        if written and not all(isinstance(each, DTensor) for each in written):
            raise Unsplittable("writes its parts into a full tensor")
        # PyTorch would write into a copy
        if func is Tensor.__setitem__ and _goes_along_shards(args[0], args[1]):
            raise Unsplittable(
                "takes some of what is sharded; where the first step does so, too, it stays whole"
            )
        rule = self.rules.get(func)
        if rule is not None:
            result = rule(self.shard_group, func, args, kwargs)
            if result is not NotImplemented:
                return result
        if torch.is_grad_enabled():
            args, kwargs = map_arguments((args, kwargs), self.wrapped)
        result = _plain(func, types, args, kwargs)
        for part in parts:
            note_pieces(
                part, [each for each in tensors_in(result) if is_copied(each, part, func)], name_of(func)
            )
        return result

    def wrapped(self, tensor: Tensor) -> Tensor:
        """A full tensor with a gradient, so that its gradient becomes plain and whole again."""
        if tensor.requires_grad and not isinstance(tensor, DTensor):
            return DTensor.from_local(tensor, self.shard_group.mesh, [Replicate()], run_check=False)
        return tensor

    def on_full_tensors(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: BaseException
    ) -> Any:
        """The function's result for full tensors, which each rank gathers."""
        if any(isinstance(each, DTensor) for each in targets(func, args, kwargs)):
            raise UsageError(
                f"{name_of(func)} writes into a tensor that is split over axis tp, and needs the whole ({reason}); "
                "write into a copy: x.clone()"
            ) from reason
        copies: list[tuple[DTensor, Tensor]] = []

        def whole(tensor: Tensor) -> Tensor:
            full = self.full_tensor(tensor)
            if isinstance(tensor, DTensor) and not share_memory(full, tensor):
                copies.append((tensor, full))
            return full

        args, kwargs = map_arguments((args, kwargs), whole)
        result = func(*args, **kwargs)
        for shard, full in copies:
            note_pieces(
                shard, [each for each in tensors_in(result) if share_memory(each, full)], name_of(func)
            )
            if isinstance(full, DTensor):
                pass_on(full, shard)
        return result

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """A plain tensor with what the ranks hold together."""
        return as_full_tensor(tensor)


def _goes_along_shards(tensor: DTensor, index: Any) -> bool:
    """True if an index takes some places of a sharded dim: one, or those from one to another."""
    index = [each for each in (index if isinstance(index, tuple) else (index,)) if each is not None]
    if any(isinstance(each, (Tensor, list)) for each in index):
        return False
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (tensor.ndim - len(index) + 1)
    dims = {getattr(placement, "dim", None) for placement in tensor.placements}
    return any(
        dim in dims and not (isinstance(each, slice) and each.indices(size) == (0, size, 1))
        for dim, (each, size) in enumerate(zip(index, tensor.shape, strict=False))
    )


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """A plain tensor with what the ranks hold together, if each has a part of it; all of them call this together.

    The whole is for what every rank computes alike: its gradient is the same on each.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    functions = _answering(tensor)
    if functions is None:
        return as_full_tensor(tensor)
    check_pieces(tensor)
    functions.shard_group.agree(ALL_GATHERS)
    with torch.enable_grad():
        return functions.full_tensor(tensor)


def _answering(part: DTensor) -> Functions | None:
    names = part.device_mesh.mesh_dim_names
    return None if names is None else _functions.get(names[0])


def name_of(func: Any) -> str:
    """The function's name in a message."""
    return str(getattr(func, "__name__", func)).strip("_")


def _torch_function(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Stands for ``DTensor.__torch_function__``."""
    if func in METADATA or func in AUTOGRAD:
        return _plain(func, types, args, kwargs or {})
    for part in shards_in(args, kwargs or {}):
        functions = _answering(part)
        if functions is not None:
            written = targets(func, args, kwargs or {})
            for each in shards_in(args, kwargs or {}):
                check_pieces(each, any(each is target for target in written))
            take_plain_as_replicated_here()
            return functions(func, types, args, kwargs or {})
    return _plain(func, types, args, kwargs or {})


def answered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of the model's own, among whose arguments are sharded tensors, by the rules of these."""
    return _torch_function(func, (), args, kwargs)


def answer(functions: Functions) -> None:
    """From now on these run on the tensors of their sharding group."""
    _functions[functions.shard_group.name] = functions
    if DTensor.__torch_function__ is not _torch_function:
        DTensor.__torch_function__ = staticmethod(_torch_function)  # type: ignore[method-assign]


@contextmanager
def answering(functions: Functions) -> Iterator[None]:
    """Inside, these answer for the tensors of their group, which are gone afterwards."""
    answer(functions)
    try:
        yield
    finally:
        _functions.pop(functions.shard_group.name, None)
