"""A linear layer whose result is deferred until a loss needs it, and what operations make of that result.

``FORWARD`` has the operations that leave rows whole, and those of losses, which take rows in chunks; ``BACKWARD``
those of losses' backward passes; ``ADJOINT`` those of a backward pass that undo what one of ``FORWARD`` has done. All
others get the logits as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import enable_reentrant_dispatch

from weft.torch.pytorch.private import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, TO_COPY, UNSAFE_VIEW
from weft.torch.tensors.deferred_logits import (
    Deferred,
    DeferredGrad,
    Gradients,
    Logits,
    Rules,
    Source,
    Use,
    gradient_of_logits,
    settled,
)

aten = torch.ops.aten

# --- what leaves rows whole -----------------------------------------------------------------------------------


def _reshaped(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    like = func(one.like, *rest)
    if not like.dim() or like.shape[-1] != one.shape[-1]:
        return None
    return one.child(func, rest, kwargs, one.rows.reshape(like.shape[:-1]))


def _unsqueezed(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    dim = rest[0] + len(one.shape) + 1 if rest[0] < 0 else rest[0]
    return one.child(func, rest, kwargs, one.rows.unsqueeze(dim)) if dim < len(one.shape) else None


def _of_rows(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    """Slices and choices along another dim than the last."""
    dim = rest[0] if rest else 0
    dim = dim + len(one.shape) if dim < 0 else dim
    if dim < len(one.shape) - 1:
        return one.child(func, rest, kwargs, func(one.rows, dim, *rest[1:], **kwargs))
    whole = func is aten.slice.Tensor and func(one.like, *rest, **kwargs).shape == one.shape
    return one.child(func, rest, kwargs) if whole else None


def _same(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    return one.child(func, rest, kwargs)


def _cast(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or one.dtype
    elsewhere = (
        kwargs.get("device", one.device) != one.device or kwargs.get("layout", torch.strided) != torch.strided
    )
    if elsewhere or not dtype.is_floating_point:
        return None
    return one.child(func, (), {"dtype": dtype}, maps=True)


def _scaled(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    if kwargs or len(rest) != 1 or not isinstance(rest[0], (int, float)):
        return None
    return one.child(func, rest, kwargs, maps=True)


def _tanh(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    return one.child(func, rest, kwargs, maps=True)


def _log_softmax(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    if len(one.shape) != 2 or rest[0] not in (1, -1) or not len(one.rows) or one.normalised:
        return None
    return one.child(func, rest, kwargs)


def _nll(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    """The loss of rows at labels, [rows] or a number, and the sum of the labels' weights."""
    labels, weight, reduction, ignored = rest
    if not one.normalised:
        return None
    shares = _shares(one, labels, weight, ignored)
    total = shares.sum()
    picked = torch.zeros(len(labels), dtype=one.dtype, device=one.device)
    safe = torch.where(labels == ignored, 0, labels)
    logits = one.parent
    assert logits is not None
    ahead = _ahead(one) if reduction else None
    at_labels = _at_labels(labels, ignored, -shares / total if reduction == 1 else -shares)
    for at, inputs, layer, mapped in logits.chunks():
        logp = torch.log_softmax(mapped, -1, dtype=one.dtype)
        picked[at] = logp.gather(1, safe[at].unsqueeze(1)).squeeze(1)
        if ahead is not None:
            of_logits = gradient_of_logits(logp, safe[at], at_labels[at])
            with enable_reentrant_dispatch() if logits.maps else nullcontext():
                of_logits = logits.back(layer, of_logits)
            ahead.add(logits.rows[at], inputs, of_logits)
    one.ahead = ahead
    losses = torch.where(labels == ignored, picked.new_zeros(()), -picked * shares)
    if reduction == 0:
        return losses, losses.new_zeros(())
    found = losses.sum()
    return (found / total if reduction == 1 else found), total


def _ahead(one: Logits) -> Gradients | None:
    """Gradients to compute together with the loss, if it goes backward, and as far as is known by itself.

    In half precision gradients need the factor that the loss is scaled by.
    """
    source = one.source
    use = source.use
    if (
        not (torch.is_grad_enabled() and any(source.wanted) and use.ahead)
        or use.holds
        or one.ahead is not None
    ):
        return None
    if source.weight.dtype == torch.float16:
        return None
    found = Gradients(source)
    use.hold(found)
    return found


def _at_labels(labels: Tensor, ignored: int, grad: Tensor) -> Tensor:
    """The gradient at each row's label, [rows]: nothing at ignored ones, also where the mean is over no row at all."""
    return torch.where(labels == ignored, grad.new_zeros(()), grad)


def _shares(one: Logits, labels: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """The weight of each row in the loss."""
    counts = labels != ignored
    if weight is None:
        return counts.to(one.dtype)
    return torch.where(counts, weight[torch.where(counts, labels, 0)], weight.new_zeros(()))


def _sums(one: Logits, func: Any, rest: Any, kwargs: Any) -> Any:
    """The sum of each row's logarithms, which label smoothing takes."""
    dims = [dim % 2 for dim in rest[0]] if len(one.shape) == 2 and rest and rest[0] else []
    if not one.normalised or dims != [1] or kwargs or rest[1:] not in ((), (False,)):
        return None
    assert one.parent is not None
    sums = torch.zeros(len(one.rows), dtype=one.dtype, device=one.device)
    for at, _, _, mapped in one.parent.chunks():
        sums[at] = torch.log_softmax(mapped, -1, dtype=one.dtype).sum(1)
    return sums


FORWARD: dict[Any, Callable[[Logits, Any, Any, Any], Any]] = {
    aten.view.default: _reshaped,
    UNSAFE_VIEW: _reshaped,
    aten.unsqueeze.default: _unsqueezed,
    aten.slice.Tensor: _of_rows,
    aten.select.int: _of_rows,
    aten.clone.default: _same,
    TO_COPY: _cast,
    aten.mul.Tensor: _scaled,
    aten.div.Tensor: _scaled,
    aten.tanh.default: _tanh,
    LOG_SOFTMAX: _log_softmax,
    aten.nll_loss_forward.default: _nll,
    aten.sum.dim_IntList: _sums,
}


# --- and back ------------------------------------------------------------------------------------------------


def _nll_backward(
    grad: Tensor,
    logp: Logits,
    labels: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor,
) -> Any:
    if not logp.normalised or isinstance(grad, (Deferred, DeferredGrad)):
        return None
    at = -grad * _shares(logp, labels, weight, ignored)
    at = _at_labels(labels, ignored, at / total if reduction == 1 else at)
    factor = grad if reduction and logp.ahead is not None else None
    return DeferredGrad(logp, logp, torch.where(labels == ignored, 0, labels), at, factor=factor)


def _log_softmax_backward(grad: Tensor, logp: Logits, *_: Any) -> Any:
    if (
        not isinstance(grad, DeferredGrad)
        or grad.of is not logp
        or grad.logp is not logp
        or logp.parent is None
    ):
        return None
    return grad.moved(logp.parent)


BACKWARD: dict[Any, Callable[..., Any]] = {
    aten.nll_loss_backward.default: _nll_backward,
    LOG_SOFTMAX_BACKWARD: _log_softmax_backward,
}


def _undoes_view(of: Logits, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None and of.parent is not None
    reshapes = of.made.func in (aten.view.default, UNSAFE_VIEW)
    return reshapes and list(rest[0]) == list(of.parent.shape)


def _undoes_slice(of: Logits, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None and of.parent is not None
    sizes, dim, *ends = rest
    func, rows, before = of.made.func, of.parent.rows, of.parent.shape
    if func is not (aten.slice.Tensor if len(ends) == 3 else aten.select.int) or list(sizes) != list(before):
        return False
    if dim == len(before) - 1:  # all words
        return of.shape == before
    return torch.equal(func(rows, dim, *ends), func(rows, *of.made.args))


def _undoes_cast(of: Logits, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None and of.parent is not None
    return of.made.func is TO_COPY and kwargs.get("dtype") == of.parent.dtype


def _undoes_scale(func: Any) -> Callable[[Logits, Any, Any], bool]:
    def rule(of: Logits, rest: Any, kwargs: Any) -> bool:
        assert of.made is not None
        if of.made.func is not func or kwargs or len(rest) != 1:
            return False
        by = rest[0].item() if isinstance(rest[0], Tensor) and not rest[0].dim() else rest[0]
        return isinstance(by, (int, float)) and by == of.made.args[0]

    return rule


def _undoes_tanh(of: Logits, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None
    return of.made.func is aten.tanh.default and isinstance(rest[0], Deferred) and rest[0].logits is of


def _undoes_unsqueeze(of: Logits, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None and of.parent is not None
    return of.made.func is aten.unsqueeze.default and of.like.squeeze(*rest).shape == of.parent.shape


ADJOINT: dict[Any, Callable[[Logits, Any, Any], bool]] = {
    aten.view.default: _undoes_view,
    UNSAFE_VIEW: _undoes_view,
    aten.slice_backward.default: _undoes_slice,
    aten.select_backward.default: _undoes_slice,
    aten.squeeze.dim: _undoes_unsqueeze,
    TO_COPY: _undoes_cast,
    aten.mul.Tensor: _undoes_scale(aten.mul.Tensor),
    aten.div.Tensor: _undoes_scale(aten.div.Tensor),
    aten.tanh_backward.default: _undoes_tanh,
}
RULES = Rules(FORWARD, BACKWARD, ADJOINT)


class _Linear(Function):
    """A linear layer with a result that is deferred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, use: Use) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        rows = torch.arange(x.numel() // x.shape[-1]).view(x.shape[:-1])
        ctx.source = Source(x, weight, bias, use, ctx.needs_input_grad[:3], RULES)
        like = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype, device="meta")
        return Deferred(Logits(ctx.source, rows, like))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors  # refuses those that have changed
        source: Source = ctx.source
        if torch.is_grad_enabled():  # these gradients are to be differentiated themselves
            rows = grad.reshape(-1, grad.shape[-1])
            of_x = (rows @ weight).view(x.shape)
            return (
                of_x,
                rows.t() @ x.reshape(-1, x.shape[-1]),
                rows.sum(0) if source.wanted[2] else None,
                None,
            )
        gradients, factor = None, None
        of = grad.of.before_copies() if isinstance(grad, DeferredGrad) else None
        if isinstance(grad, DeferredGrad) and of is not None and of.parent is None and of.source is source:
            gradients, factor, grad.logp.ahead = grad.logp.ahead, grad.factor, None
            if gradients is None or factor is None:
                source.use.ahead = source.use.ahead and gradients is None
                gradients, factor = Gradients(source), None
                for at, inputs, found in grad.chunks():
                    gradients.add(grad.logp.rows[at], inputs, found)
        else:
            dense = grad.dense() if isinstance(grad, DeferredGrad) else settled(grad)
            gradients = Gradients(source)
            gradients.add(torch.arange(len(source.x)), source.x, dense.reshape(-1, dense.shape[-1]))
        of_x, of_weight, of_bias = gradients.scaled(factor)
        return None if of_x is None else of_x.view(x.shape), of_weight, of_bias, None


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None, use: Use) -> Tensor:
    """``linear(x, weight, bias)``, computed when it is known what for."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    found: Tensor = _Linear.apply(x, weight, bias, use)  # type: ignore[no-untyped-call]
    return found
