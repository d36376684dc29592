"""Rules of functions on sharded activations: each rank computes its shard.

Three kinds: functions of each number by itself, functions along other dimensions than that of the parts (norms, whole
linears), and views that leave this dimension as it is. Losses have rules of their own, see ``losses``. A rule gives
``NotImplemented`` where the whole is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.torch.pytorch.torch_functions import named
from weft.torch.tensor_parallel.rules import stream_of_part
from weft.torch.tensor_parallel.shard_group import leave
from weft.torch.tensors.pytree import map_arguments

from .sequence import narrowed
from .tensor import RULES, ShardedActivation, sharded_in

PARTS = "parts"


class _Whole(Exception):
    """The function needs the whole."""


def one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of each number by itself, with tensors that PyTorch makes as large as each other."""
    given = sharded_in((args, kwargs))
    like, back, total = given[0], given[0].back, given[0].positions.total

    def shard(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedActivation):
            if tensor.back != back or tensor.positions != like.positions:
                raise _Whole
            return tensor.shard
        if isinstance(tensor, DTensor):
            raise _Whole
        if tensor.ndim < back or tensor.shape[-back] == 1:
            return like.shard_group.uses(tensor)
        if tensor.shape[-back] != total:
            raise _Whole
        return narrowed(tensor, tensor.ndim - back, like.positions, like.shard_group)

    try:
        own, more = map_arguments((args, kwargs), shard)
    except _Whole:
        return NotImplemented
    result = func(*own, **more)
    if not isinstance(result, Tensor):
        return NotImplemented
    like.shard_group.noted(frozenset().union(*(each.names for each in given)), "", PARTS)
    for each in given:
        if result is each.shard:
            return each
    made = like.like(result, result.ndim - back)
    made.names = frozenset().union(*(each.names for each in given))
    return made


def along_others(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of one sharded activation, whose other tensors are weights, that works along other dimensions."""
    (given, *others) = sharded_in((args, kwargs))
    weights = [each for each in args[1:] if isinstance(each, Tensor)]
    if others or (args and args[0] is not given) or any(isinstance(each, DTensor) for each in weights):
        return NotImplemented
    own, more = map_arguments(
        (args, kwargs), lambda each: given.shard if each is given else given.shard_group.uses(each)
    )
    result = func(*own, **more)
    given.shard_group.noted(given.names, "", PARTS)
    return given.like(result, result.ndim - given.back)


def norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Layer norm and the like, over the last dimensions."""
    (given, *_) = sharded_in((args, kwargs))
    shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
    return along_others(func, args, kwargs) if len(shape) < given.back else NotImplemented


def linear(func: Any, args: Any, kwargs: Any) -> Any:
    """A linear that is whole on each rank."""
    (given, *_) = sharded_in((args, kwargs))
    return along_others(func, args, kwargs) if given.back > 1 else NotImplemented


def reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """A mean or a sum of all numbers, or over another dimension, which stays with size 1."""
    (given, *_) = sharded_in((args, kwargs))
    if len(args) == 1 and not kwargs and given.shard.is_floating_point():
        exact = torch.promote_types(given.dtype, torch.float32)
        total = leave(given.shard.sum(dtype=exact), given.shard_group)
        given.shard_group.noted(given.names, "", PARTS)
        return (total / given.numel() if func in _MEAN else total).to(given.dtype)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if type(dim) is not int or keep is not True or dim % given.ndim == given.along:
        return NotImplemented
    return along_others(func, args, kwargs)


def compared(func: Any, args: Any, kwargs: Any) -> Any:
    """A loss of each number by itself, and what becomes of all."""
    old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
    weighted = kwargs.get("weight") is not None and func is not F.binary_cross_entropy_with_logits
    how = kwargs.get("reduction", "mean")
    if len(args) > 2 or old or how not in ("none", "mean", "sum") or (weighted and how == "mean"):
        return NotImplemented  # a mean of others than the numbers, or another error than weft's
    each = one_by_one(func, args, {**kwargs, "reduction": "none"})
    if each is NotImplemented:
        return NotImplemented
    return each if how == "none" else getattr(each, how)()


def soft(func: Any, args: Any, kwargs: Any) -> Any:
    """Softmax and the like, along another dimension."""
    (given, *_) = sharded_in((args, kwargs))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return (
        along_others(func, args, kwargs)
        if type(dim) is int and dim % given.ndim != given.along
        else NotImplemented
    )


def dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Each part with numbers of its own."""
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, ShardedActivation) or len(sharded_in((args, kwargs))) > 1:
        return NotImplemented
    how = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    draws = how.get("p", 0.5) > 0 and bool(how.get("training", how.get("train", True)))
    own, more = map_arguments((args, kwargs), lambda each: given.shard)
    with stream_of_part(given.shard_group, draws):
        result = func(*own, **more)
    given.shard_group.noted(given.names, "", PARTS)
    return given.like(result, given.along)


# --- views -------------------------------------------------------------------------------------------------


def _again(func: Any, args: Any, kwargs: Any) -> Callable[[Tensor], Tensor]:
    """A function that makes the same view of the whole."""
    return lambda full: func(full, *args[1:], **kwargs)


def indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """Slices along any dimensions."""
    given, index = args[0], args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(given, ShardedActivation) or not all(
        each is None or each is Ellipsis or type(each) in (int, slice) for each in items
    ):
        return NotImplemented
    taken = sum(each is not None and each is not Ellipsis for each in items)
    missing = [slice(None)] * (given.ndim - taken)
    where = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[where : where + 1] = missing
    old = new = 0
    for at, each in enumerate(items):
        if each is not None and old == given.along:
            total = given.shape[old]
            if type(each) is not slice or each.indices(total)[2] != 1:
                return NotImplemented
            first, stop, _ = each.indices(total)
            positions = given.positions.taken(first, stop)
            if 0 in positions.sizes:
                return NotImplemented
            before, count = given.positions.within(given.shard_group.rank, first, stop)
            items[at] = slice(before, before + count)
            return given.like(given.shard[tuple(items)], new, _again(func, args, kwargs), positions)
        new += type(each) is not int
        old += each is not None
    return NotImplemented


def seen(func: Any, args: Any, kwargs: Any) -> Any:
    """Another shape, in which the dimension of the parts is one as before, or one with those before it."""
    given = args[0] if args else None
    if not isinstance(given, ShardedActivation) or kwargs:
        return NotImplemented
    old, rest = tuple(given.shape), args[1:]
    if func in _FLATTEN:
        first, last = (each % given.ndim for each in (*rest, *(0, -1)[len(rest) :]))
        shape = [*old[:first], math.prod(old[first : last + 1]), *old[last + 1 :]]
    elif func is Tensor.view_as or func is Tensor.reshape_as:
        shape = list(rest[0].shape)
    else:
        shape = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else list(rest)
    if not all(type(size) is int for size in shape):
        return NotImplemented
    if shape.count(-1) == 1:
        others = -math.prod(shape)
        shape[shape.index(-1)] = math.prod(old) // others if others else 0
    inner, total = math.prod(old[given.along + 1 :]), old[given.along]
    for at, size in enumerate(shape):
        if (
            not total
            or size % total
            or math.prod(shape[at + 1 :]) != inner
            or math.prod(shape) != math.prod(old)
        ):
            continue
        times = size // total
        if any(times == math.prod(old[first : given.along]) for first in range(given.along + 1)):
            shape[at] = times * given.shard.shape[given.along]
            positions = given.positions.repeated(times) if times > 1 else given.positions
            shard = given.shard.reshape(shape)  # which may have other strides than the whole
            return given.like(shard, at, _again(func, args, kwargs), positions)
    return NotImplemented


def swapped(func: Any, args: Any, kwargs: Any) -> Any:
    """Dimensions in another order."""
    given, rest = args[0], args[1:]
    if not isinstance(given, ShardedActivation) or kwargs:
        return NotImplemented
    order = list(range(given.ndim))
    if func in _PERMUTE:
        order = [
            each % given.ndim
            for each in (rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest)
        ]
    else:
        one, other = (each % given.ndim for each in rest)
        order[one], order[other] = other, one
    return given.like(given.shard.permute(order), order.index(given.along), _again(func, args, kwargs))


_MEAN = named((torch, Tensor), ("mean",))
_FLATTEN = named((torch, Tensor), ("flatten",))
_RESHAPE = named((torch, Tensor), ("reshape", "reshape_as")) | _FLATTEN
_PERMUTE = named((torch, Tensor), ("permute",))
_EVERYWHERE = (torch, Tensor, F)

RULES.update(
    {
        **dict.fromkeys(
            named(
                _EVERYWHERE,
                ("add", "sub", "mul", "div", "true_divide", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
                 "__rmul__", "__truediv__", "__rtruediv__", "__neg__", "neg", "pow", "__pow__", "__rpow__", "rsub",
                 "square", "sqrt", "rsqrt", "reciprocal", "exp", "log", "tanh", "sigmoid", "abs", "clamp", "clip",
                 "gelu", "silu", "relu", "softplus", "elu", "leaky_relu", "mish", "hardtanh", "where", "masked_fill",
                 "to", "float", "half", "bfloat16", "double", "type_as", "type", "contiguous", "clone", "maximum",
                 "minimum", "multiply", "divide", "subtract", "lerp", "nan_to_num"),
            ),
            one_by_one,
        ),
        **dict.fromkeys(named((torch, F), ("layer_norm", "rms_norm")), norm),
        F.linear: linear,
        **dict.fromkeys(named((torch, Tensor), ("mean", "sum")), reduced),
        **dict.fromkeys(
            named((F,), ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")),
            compared,
        ),
        **dict.fromkeys(named(_EVERYWHERE, ("dropout",)), dropout),
        **dict.fromkeys(named((torch, Tensor, F), ("softmax", "log_softmax")), soft),
        Tensor.__getitem__: indexed,
        **dict.fromkeys(named((Tensor,), ("view", "view_as")), seen),
        **dict.fromkeys(_RESHAPE, seen),
        **dict.fromkeys(named((torch, Tensor), ("transpose", "swapaxes", "swapdims")), swapped),
        **dict.fromkeys(_PERMUTE, swapped),
    }
)  # fmt: skip
