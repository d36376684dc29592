"""Losses of sharded logits: each rank has the scores of some classes.

What a loss needs of all classes are a maximum and two sums for each sample: the sum of exponentials, and the score of
the class that is right, which one rank has. So ranks send numbers for each sample, not scores for each class, as in
Megatron-LM (https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.torch.pytorch.torch_functions import named
from weft.torch.tensor_parallel.shard_group import Quiet, leave

from .rules import PARTS, soft
from .tensor import RULES, ShardedActivation, sharded_in

_HALF = (torch.float16, torch.bfloat16)
_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)
LOSS = "loss"


def _taken(args: Any, kwargs: Any) -> tuple[dict[str, Any], ShardedActivation, Tensor, _Targets] | None:
    """The arguments by name, the scores, this rank's part of them with the classes in the last dimension, and the
    targets; None where the whole is needed."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    scores, target, weight = given.get("input"), given.get("target"), given.get("weight")
    if len(sharded_in((args, kwargs))) != 1 or not isinstance(scores, ShardedActivation):
        return None
    dim = 0 if scores.ndim == 1 else 1
    shape = [size for at, size in enumerate(scores.shape) if at != dim]
    if not isinstance(target, Tensor) or target.is_floating_point() or list(target.shape) != shape:
        return None
    if scores.along != dim or given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if weight is not None and (weight.requires_grad or given.get("label_smoothing", 0.0)):
        return None
    found = _Targets(target, scores, given.get("ignore_index", -100))
    return given, scores, _shard(scores).movedim(dim, -1), found


def _shard(scores: ShardedActivation) -> Tensor:
    """This rank's scores, as exact as PyTorch would take them here."""
    shard = scores.shard
    return shard.float() if shard.dtype in _HALF and torch.is_autocast_enabled(shard.device.type) else shard


class _Targets:
    """The samples whose class this rank has, as ``here``, and where, as ``at``."""

    def __init__(self, target: Tensor, scores: ShardedActivation, ignore: int) -> None:
        self.ignored = target == ignore
        ((first, count),) = scores.positions.spans[scores.shard_group.rank]
        total = scores.positions.total
        self.here = (target >= first) & (target < first + count) & ~self.ignored
        unknown = ((target < 0) | (target >= total)) & ~self.ignored
        self.at = (target - first).masked_fill(~self.here, 0).masked_fill(unknown, count)
        self.total = total

    def picked(self, shard: Tensor) -> Tensor:
        """The scores of the right classes in the last dimension; 0 for those of other ranks."""
        try:
            found = shard.gather(-1, self.at.unsqueeze(-1)).squeeze(-1)
        except RuntimeError as error:  # on GPUs the kernel ends, as PyTorch's own does
            if "out of bounds" not in str(error):
                raise
            raise IndexError(f"a target is none of the {self.total} classes: {error}") from error
        return found.masked_fill(~self.here, 0.0)


def _reduced(each: Tensor, given: dict[str, Any], target: Tensor, ignored: Tensor) -> Tensor:
    """The losses of all samples as the caller wants them."""
    each = each.masked_fill(ignored, 0.0)
    weight, reduction = given.get("weight"), given.get("reduction", "mean")
    if weight is not None:
        weights = weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0.0)
        each = each * weights
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    if reduction != "mean":
        raise ValueError(f"{reduction} is not a valid value for reduction")
    count = (~ignored).sum().to(each.dtype) if weight is None else weights.sum()
    return each.sum() / count


def cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """``F.cross_entropy`` for sharded classes."""
    taken = _taken(args, kwargs)
    if taken is None:
        return of_samples(func, args, kwargs)
    given, scores, shard, found = taken
    each = Losses.apply(shard, found, scores.shard_group, float(given.get("label_smoothing", 0.0)))
    scores.shard_group.noted(scores.names, "", LOSS)
    return _reduced(each.to(shard.dtype), given, given["target"], found.ignored).to(shard.dtype)


def likelihood(func: Any, args: Any, kwargs: Any) -> Any:
    """``F.nll_loss`` for sharded logarithms of probabilities."""
    taken = _taken(args, kwargs)
    if taken is None:
        return of_samples(func, args, kwargs)
    given, scores, shard, found = taken
    scores.shard_group.noted(scores.names, "", LOSS)
    return _reduced(-leave(found.picked(shard), scores.shard_group), given, given["target"], found.ignored)


def of_samples(func: Any, args: Any, kwargs: Any) -> Any:
    """Such a loss where each rank has all scores of some samples, or of some of their positions."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    scores, target, weight = given.pop("input", None), given.pop("target", None), given.pop("weight", None)
    reduction, ignore = given.pop("reduction", "mean"), given.get("ignore_index", -100)
    if (
        len(sharded_in((args, kwargs))) != 1
        or not isinstance(scores, ShardedActivation)
        or scores.ndim < 2
        or scores.along == 1
    ):
        return NotImplemented
    shape = [size for at, size in enumerate(scores.shape) if at != 1]
    if not isinstance(target, Tensor) or target.is_floating_point() or list(target.shape) != shape:
        return NotImplemented
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return NotImplemented
    if reduction not in ("none", "mean", "sum") or (weight is not None and weight.requires_grad):
        return NotImplemented
    at = max(0, scores.along - 1)
    own = scores.positions.own(target, at, scores.shard_group.rank)
    scores.shard_group.noted(scores.names, "", PARTS)
    if reduction == "none":
        return scores.like(func(scores.shard, own, weight=weight, **given, reduction="none"), at)
    shard = _shard(scores)
    weight = weight if weight is None else weight.to(_exact(shard).dtype)
    total = leave(func(_exact(shard), own, weight=weight, **given, reduction="sum"), scores.shard_group)
    if reduction == "mean":
        ignored = target == ignore
        total = total / (
            (~ignored).sum() if weight is None else weight[target.masked_fill(ignored, 0)][~ignored].sum()
        )
    return total.to(shard.dtype)


def logarithms(func: Any, args: Any, kwargs: Any) -> Any:
    """``log_softmax`` along the sharded classes."""
    (scores, *others) = sharded_in((args, kwargs))
    given = {**dict(zip(("input", "dim"), args, strict=False)), **kwargs}
    if others or type(given.get("dim")) is not int or given["dim"] % scores.ndim != scores.along:
        return soft(func, args, kwargs)
    if len(args) > 2 or kwargs.keys() - {"input", "dim", "dtype", "_stacklevel"}:
        return NotImplemented
    shard = _shard(scores)
    shard = shard if given.get("dtype") is None else shard.to(given["dtype"])
    result = LogSoftmax.apply(shard, scores.along, scores.shard_group)
    return scores.like(result, scores.along)


def total_logarithm(func: Any, args: Any, kwargs: Any) -> Any:
    """``logsumexp`` along the sharded classes."""
    (scores, *others) = sharded_in((args, kwargs))
    given = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    dim = given.get("dim")
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if others or type(dim) is not int or dim % scores.ndim != scores.along:
        return NotImplemented
    found: Tensor = LogSumExp.apply(_shard(scores), scores.along, scores.shard_group)
    return found if given.get("keepdim") else found.squeeze(scores.along)


RULES.update(
    {
        F.cross_entropy: cross_entropy,
        F.nll_loss: likelihood,
        **dict.fromkeys(named((torch, Tensor, F), ("log_softmax",)), logarithms),
        **dict.fromkeys(named((torch, Tensor), ("logsumexp",)), total_logarithm),
    }
)


def _exact(shard: Tensor) -> Tensor:
    return shard.float() if shard.dtype in _HALF else shard


def _logarithm(shard: Tensor, dim: int, shard_group: Any, *more: Tensor) -> list[Tensor]:
    """Of all classes the logarithm of the sum of exponentials, and sums of other numbers; ``dim`` has size 1."""
    most = shard_group.all_reduce_max(shard.amax(dim, keepdim=True))
    sums = (shard - most).exp_().sum(dim, keepdim=True)
    sums, *others = shard_group.all_reduce(torch.stack([sums, *more])).unbind()
    return [sums.log_().add_(most), *others]


class Losses(Quiet):
    """For each sample the cross entropy of its scores, of which this rank has a part in the last dimension."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, found: _Targets, shard_group: Any, smoothing: float) -> Tensor:
        exact = _exact(shard)
        more = [found.picked(exact).unsqueeze(-1)] + [exact.sum(-1, keepdim=True)] * (smoothing > 0)
        total, right, *all_scores = _logarithm(exact, -1, shard_group, *more)
        losses = total - right
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (total - all_scores[0] / found.total)
        ctx.save_for_backward(shard, total)
        ctx.found, ctx.smoothing = found, smoothing
        return losses.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shard, total = ctx.saved_tensors
        found, smoothing = ctx.found, ctx.smoothing
        result = (_exact(shard) - total).exp_()
        if smoothing:
            result -= smoothing / found.total
        right = found.here.to(result.dtype).unsqueeze(-1) * (smoothing - 1)
        result.scatter_add_(-1, found.at.unsqueeze(-1), right)
        return (result * gradient.unsqueeze(-1)).to(shard.dtype), None, None, None


class LogSoftmax(Quiet):
    """The logarithms of probabilities, of which each rank has a part along ``dim``."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, shard_group: Any) -> Tensor:
        exact = _exact(shard)
        (total,) = _logarithm(exact, dim, shard_group)
        result = (exact - total).to(shard.dtype)
        ctx.save_for_backward(result)
        ctx.dim, ctx.shard_group = dim, shard_group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        exact = _exact(gradient)
        total = ctx.shard_group.all_reduce(exact.sum(ctx.dim, keepdim=True))
        return (exact - _exact(result).exp() * total).to(gradient.dtype), None, None


class LogSumExp(Quiet):
    """The logarithm of the sum of all classes' exponentials; ``dim`` has size 1 then."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, shard_group: Any) -> Tensor:
        (total,) = _logarithm(_exact(shard), dim, shard_group)
        ctx.save_for_backward(shard, total)
        return total.to(shard.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shard, total = ctx.saved_tensors
        return ((_exact(shard) - total).exp_() * gradient).to(shard.dtype), None, None
