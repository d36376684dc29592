"""Rules of functions on sequences of which each rank has some positions: weft's own, then PyTorch's.

A rule computes this rank's positions from them alone, or from the keys and values of all. What no rule knows is done
with the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right

from weft.torch.pytorch.private import no_dispatch_modes
from weft.torch.pytorch.torch_functions import METADATA, named
from weft.torch.tensor_parallel.functions import FATAL, Functions
from weft.torch.tensor_parallel.rules import (
    RULES,
    Rule,
    Unsplittable,
    as_full_tensor,
    concatenated,
    drawn,
    draws,
    over_sequences,
    shard_of,
    shards_in,
    statistics,
    stream_of_part,
)
from weft.torch.tensor_parallel.shard_group import ShardGroup, shard_group_of
from weft.torch.tensor_parallel.sharded_activations import plain
from weft.torch.tensors.marks import WINDOW
from weft.torch.tensors.pytree import map_arguments

from . import all_to_all
from .exchange import KeptSharded, gather, like, own, sharded, share
from .recurrences import CUMULATIVE, RECURRENT
from .scans import KNOWN
from .shifts import CONVOLUTIONS, SHIFTS, shifted
from .weights import ContextGroup, used, used_replicated
from .windows import reach_of, windowed
from .zigzag import check_blocks


def gathered(tensor: Tensor, shard_group: ShardGroup) -> Tensor:
    """A plain tensor with what the ranks hold together, for what every one of them computes alike."""
    owner = shard_group_of(tensor) if isinstance(tensor, DTensor) else None
    if isinstance(owner, ContextGroup) and isinstance(tensor, DTensor):
        tensor = owner.along_positions(tensor)
        owner = shard_group_of(tensor)
    if owner is not None and (window := getattr(tensor, WINDOW)) is not None:
        full: Tensor = window.whole(owner)
        return full
    ours = owner is None or owner is shard_group or isinstance(owner, ContextGroup)  # the others have heads
    if ours and isinstance(tensor, DTensor) and shard_of(tensor) is not None:
        return gather(tensor, owner or shard_group)
    return as_full_tensor(tensor)


def _from_back(tensor: Any) -> int:
    """The dimension that is sharded, counted from the last, which is 1; 0 if the tensor is whole."""
    dim = shard_of(tensor)
    if dim is None and isinstance(tensor, DTensor):
        raise Unsplittable("sees samples and positions as one dimension")
    return 0 if dim is None else tensor.ndim - dim


def _dims_after(tensor: Any) -> int:
    """The number of dimensions after the sharded one, which may be samples and positions as one."""
    dim = getattr(tensor.placements[0], "dim", None) if isinstance(tensor, DTensor) else None
    if dim is None:
        raise Unsplittable("takes whole sequences")
    return int(tensor.ndim - dim - 1)


def _for_all(tensor: Tensor, shard_group: ShardGroup) -> Tensor:
    """An operand that every rank needs whole, for positions of its own."""
    if not isinstance(tensor, DTensor):
        return used(tensor, shard_group)
    if shard_of(tensor) is None:
        raise Unsplittable("has an operand in other parts")
    return share(tensor, shard_group)


def linear(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """A linear, position by position."""
    given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if _dims_after(x) < 1 or isinstance(weight, DTensor) or isinstance(bias, DTensor):
        raise Unsplittable("sums over positions")
    result = func(x.to_local(), used(weight, shard_group), None if bias is None else used(bias, shard_group))
    return like(result, x, shard_group)


def norm(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """A norm over the last dimensions."""
    x, shape = (*args, *kwargs.values())[:2]
    weights = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, Tensor) and each is not x]
    normed = 1 if isinstance(shape, int) else len(shape)
    if any(isinstance(each, DTensor) for each in weights) or _dims_after(x) < normed:
        raise Unsplittable("is taken over positions")
    local = x.to_local()
    args, kwargs = map_arguments((args, kwargs), lambda each: local if each is x else used(each, shard_group))
    return like(func(*args, **kwargs), x, shard_group)


_ATTENTION = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"


def is_causal(args: Any, kwargs: Any) -> bool:
    """True if attention with these arguments is causal by itself, without a mask."""
    given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
    return bool(given.get("is_causal")) and given.get("attn_mask") is None


def attention(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Scaled dot-product attention of this rank's positions to those of all."""
    given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    mask, causal = given.pop("attn_mask", None), given.pop("is_causal", False)
    if _from_back(query) != 2 or any(_from_back(each) not in (0, 2) for each in (key, value)):
        raise Unsplittable("is cut along another dimension than its positions")
    total = query.shape[-2]
    if causal and total > key.shape[-2]:
        raise Unsplittable("is causal, with fewer keys than queries")
    assert isinstance(query, DTensor)
    apart = _from_back(key) == _from_back(value) == 2
    chosen = getattr(shard_group, "attention", "all_gather")
    if mask is not None and not isinstance(mask, DTensor) and apart and chosen != "all_to_all" and not causal:
        reach = None if mask.requires_grad or key.shape[-2] != total else reach_of(mask, total, shard_group)
        if reach is not None:
            shards = query.to_local(), key.to_local(), value.to_local()
            with stream_of_part(shard_group, given.get("dropout_p", 0.0) > 0):
                return like(windowed(func, *shards, mask, reach, given, shard_group), query, shard_group)
    if (
        isinstance(shard_group, ContextGroup)
        and not isinstance(mask, DTensor)
        and apart
        and all_to_all.chosen(query, key, value, shard_group)
    ):
        shards = query.to_local(), key.to_local(), value.to_local()
        return like(_by_heads(func, shards, mask, causal, given, shard_group), query, shard_group)
    local, given_key, given_value = query.to_local(), key, value
    key, value = _for_all(key, shard_group), _for_all(value, shard_group)
    kept = KeptSharded(shard_group, (given_key, key), (given_value, value))
    if mask is not None:
        mask = _rows(mask, total, shard_group)
    with kept, stream_of_part(shard_group, given.get("dropout_p", 0.0) > 0):
        if causal and mask is None:
            spans = shard_group.positions(total).spans[shard_group.rank]
            pieces = local.split([count for _, count in spans], -2)
            found = [
                _causal(func, piece, key, value, first, given)
                for piece, (first, _) in zip(pieces, spans, strict=True)
            ]
            result = found[0] if len(found) == 1 else torch.cat(found, -2)
        else:
            result = func(local, key, value, attn_mask=mask, is_causal=causal, **given)
    return like(result, query, shard_group)


def _by_heads(
    func: Any, shards: tuple[Tensor, ...], mask: Tensor | None, causal: bool, given: dict[str, Any],
    shard_group: ShardGroup,
) -> Tensor:  # fmt: skip
    """This rank's positions of attention, of which it computes its own heads for all positions."""
    if mask is not None:
        mask = all_to_all.of_own_heads(used(mask, shard_group), shards[0].shape[-3], shard_group)
    query, key, value = all_to_all.heads_for_positions(shards, shard_group)
    with stream_of_part(shard_group, given.get("dropout_p", 0.0) > 0):
        result = func(query, key, value, attn_mask=mask, is_causal=causal, **given)
    return all_to_all.positions_for_heads(result, shard_group)


def _causal(
    func: Any, query: Tensor, key: Tensor, value: Tensor, first: int, given: dict[str, Any]
) -> Tensor:
    """Causal attention of queries that are right behind each other, from position ``first`` on."""
    count = query.shape[-2]
    key, value = key[..., : first + count, :], value[..., : first + count, :]
    mask = None
    if first:  # the first ones' keys are a square
        with no_dispatch_modes():  # inside of which this kind of tensor cannot be made
            mask = causal_lower_right(count, first + count)
    result: Tensor = func(query, key, value, attn_mask=mask, is_causal=not first, **given)
    return result


def _rows(mask: Tensor, total: int, shard_group: ShardGroup) -> Tensor:
    """Of a mask, or of what is added to scores, the rows of this rank's positions."""
    if isinstance(mask, DTensor) and _from_back(mask) == 2:
        rows: Tensor = mask.to_local()
        return rows
    mask = _for_all(mask, shard_group)
    return own(mask, -2, shard_group) if mask.ndim > 1 and mask.shape[-2] == total != 1 else mask


def product(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """A product of matrices: this rank's rows of the first with all of the second."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    first, second = args
    a, b = _from_back(first), _from_back(second)
    if first.ndim < 2 or second.ndim < 2:
        raise Unsplittable("is no product of matrices")
    if a == 2 and b < 3:
        result = func(first.to_local(), _for_all(second, shard_group))
        same = result.ndim == first.ndim
        return like(result, first, shard_group) if same else sharded(result, -2, first.shape[-2], shard_group)
    if a == 0 and b == 1:
        return sharded(func(used(first, shard_group), second.to_local()), -1, second.shape[-1], shard_group)
    if a > 2 and b in (0, a):  # matrices for each position
        second = second.to_local() if b else used(second, shard_group)
        if second.ndim >= a and not b and second.shape[-a] == first.shape[-a] != 1:
            second = own(second, -a, shard_group)
        return sharded(func(first.to_local(), second), -a, first.shape[-a], shard_group)
    raise Unsplittable("sums over positions")


def added_product(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Products of matrices in batches to which something is added."""
    given = {**dict(zip(("input", "batch1", "batch2"), args, strict=False)), **kwargs}
    added, first, second = (given.pop(name) for name in ("input", "batch1", "batch2"))
    if _from_back(first) != 2 or _from_back(second) > 2:
        raise Unsplittable("sums over positions")
    total = first.shape[-2]
    result = func(_rows(added, total, shard_group), first.to_local(), _for_all(second, shard_group), **given)
    return sharded(result, -2, total, shard_group)


def joined(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors behind each other; empty ones of one dimension count for nothing."""
    if not args or not isinstance(args[0], (list, tuple)):
        return NotImplemented
    filled = [each for each in args[0] if isinstance(each, DTensor) or each.shape != (0,)]
    if len(filled) == len(args[0]):
        return NotImplemented
    return filled[0].clone() if len(filled) == 1 else func(filled, *args[1:], **kwargs)


def dropout(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Dropout and the like: each part has random numbers of its own, unless the script gives a generator."""
    given = args[0] if args else kwargs.get("input")
    rest = [*args[1:], *(value for name, value in kwargs.items() if name != "input")]
    _dims_after(given)
    if any(isinstance(each, (Tensor, torch.Generator)) for each in rest):
        raise Unsplittable("draws random numbers for a sharded tensor")
    assert isinstance(given, DTensor)
    local = given.to_local()
    with stream_of_part(shard_group, draws(func, args, kwargs)):
        result = func(local, *args[1:], **kwargs) if args else func(**{**kwargs, "input": local})
    return given if result is local else like(result, given, shard_group)


def concatenated_positions(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors behind each other, along positions or another dim."""
    result = joined(shard_group, func, args, kwargs)
    return shifted(shard_group, func, args, kwargs) if result is NotImplemented else result


PRODUCTS = {
    F.linear: linear,
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys(named((torch, Tensor), ("matmul", "__matmul__", "bmm")), product),
    **dict.fromkeys(named((torch, Tensor), ("baddbmm",)), added_product),
    **CONVOLUTIONS,
    **RECURRENT,
}
"""The rules for what a model spends its time with."""
ALONG_POSITIONS = {F.scaled_dot_product_attention, *CONVOLUTIONS, *RECURRENT}
"""Functions whose sharded dim is that of positions."""
OWN: dict[Any, Rule] = {
    **{func: rule for func, rule in RULES.items() if rule in (drawn, over_sequences)},
    **dict.fromkeys((func for func, rule in RULES.items() if rule.__name__ == "dropout"), dropout),
    **dict.fromkeys((func for func, rule in RULES.items() if rule is concatenated), joined),
    **dict.fromkeys((func for func, rule in RULES.items() if rule is statistics), statistics),
    **PRODUCTS,
    **CUMULATIVE,
    **dict.fromkeys(named((torch, F), ("layer_norm", "rms_norm")), norm),
}


_BY_NEIGHBOURS = named(
    (torch, Tensor, F), ("argmax", "argmin", "conv2d", "conv3d", "conv_transpose1d", "unfold")
)
"""What PyTorch does by messages of its own, with blocks behind each other."""


class Positions(Functions):
    """Answers for sequences of one team."""

    rules = {
        **OWN,
        **dict.fromkeys(SHIFTS, shifted),
        **dict.fromkeys((func for func, rule in OWN.items() if rule is joined), concatenated_positions),
    }

    def on_shards(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        balanced = isinstance(self.shard_group, ContextGroup) and self.shard_group.balanced
        if balanced and func in _BY_NEIGHBOURS:
            raise Unsplittable("takes whole sequences")
        if any(getattr(each, WINDOW) is not None for each in shards_in(args, kwargs)):
            return self._on_windows(func, args, kwargs)
        if func in KNOWN:
            return KNOWN[func](self.shard_group, func, args, kwargs)
        result = super().on_shards(func, types, args, kwargs)
        if balanced and func not in METADATA:
            check_blocks(result, self.shard_group)
        return result

    def _on_windows(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result for positions that are still to be computed."""
        rule = self.rules.get(func)
        takes = func in SHIFTS or func in CONVOLUTIONS
        result = rule(self.shard_group, func, args, kwargs) if rule and takes else NotImplemented
        if result is NotImplemented:
            raise Unsplittable("takes some positions")
        return result

    def taken(self, tensor: Tensor) -> Tensor:
        """An argument without parts that are not along positions."""
        owner = shard_group_of(tensor) if isinstance(tensor, DTensor) else None
        if owner is None or owner is self.shard_group or not isinstance(tensor, DTensor):
            return plain(tensor)
        found = owner.along_positions(tensor) if isinstance(owner, ContextGroup) else tensor
        return found if shard_group_of(found) is self.shard_group else gathered(found, self.shard_group)

    def __call__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_arguments((args, kwargs), self.taken)
        try:
            return self.on_shards(func, types, args, kwargs)
        except Unsplittable as reason:
            return self.on_full_tensors(func, args, kwargs, reason)
        except FATAL:
            raise
        except Exception as reason:
            if func in OWN or func in KNOWN:
                raise  # of this rank's positions alone, perhaps: the others would not gather
            return self.on_full_tensors(func, args, kwargs, reason)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return gathered(tensor, self.shard_group)

    def wrapped(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad and not isinstance(tensor, DTensor):
            return used_replicated(tensor, self.shard_group)
        return tensor
