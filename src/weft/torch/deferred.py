"""Weight gradients later: the backward pass in two halves, I (for the inputs) and W (for the weights).

Zero-bubble schedules (Qi et al., arXiv 2401.10241) send the gradient of a stage's input as soon as it is known and
fill idle time with the gradients of its weights. Where a unit applies one of its own parameters by a function that
this module knows, autograd sees an operation without a weight: its backward gives the gradient of the input, keeps
what the weight's gradient needs, and the rank computes that when the schedule says W:

    forward    y = linear(x, weight)                 keeps x
    I          dx = dy @ weight                      keeps dy
    W          weight.grad += dy.T @ x               one call, without a temporary of the weight's size

Every other operation runs whole in I: correct, only less is left for W. So does one whose weight has hooks, is not
a leaf, or that runs under autocast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError
from weft.torch.arrival import announce, only_arrivals


class Task:
    """The gradient of ``parameter`` (and of what goes with it), for one call; calling it adds to ``.grad``."""

    __slots__ = ("_work", "parameter")

    def __init__(self, parameter: nn.Parameter, work: Callable[[], None]) -> None:
        self.parameter = parameter
        self._work = work

    def __call__(self) -> None:
        with torch.no_grad():
            self._work()


_thread = threading.local()


@contextmanager
def paused() -> Iterator[None]:
    """Inside, all runs whole: in activation checkpoints, whose second run autograd starts."""
    before = getattr(_thread, "paused", False)
    _thread.paused = True
    try:
        yield
    finally:
        _thread.paused = before


@contextmanager
def collecting(tasks: list[Task]) -> Iterator[None]:
    """The weight gradients that the backward pass on this thread leaves for later go into ``tasks``."""
    before = getattr(_thread, "tasks", None)
    _thread.tasks = tasks
    try:
        yield
    finally:
        _thread.tasks = before


def _later(parameter: nn.Parameter, work: Callable[[], None]) -> None:
    """Leave ``work`` until the schedule says W."""
    tasks = getattr(_thread, "tasks", None)
    if tasks is None:
        raise UsageError(
            "a module takes gradients inside of its forward, which a schedule that splits the backward pass cannot do: "
            'choose another one, for example {"pipeline": "interleaved"}'
        )
    tasks.append(Task(parameter, work))


def add_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add to ``parameter.grad`` as autograd does."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad
    announce(parameter)


def add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Add the matrix product ``left @ right`` to ``parameter.grad``."""
    if parameter.grad is None:
        parameter.grad = left @ right
    else:
        parameter.grad.addmm_(left, right)
    announce(parameter)


def rows(tensor: Tensor) -> Tensor:
    """[..., n] as [rows, n]."""
    return tensor.reshape(-1, tensor.shape[-1])


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` with ``weight`` [out, in], or ``x @ weight + bias`` with ``weight`` [in, out].

    The parameters come inside a tuple: autograd is not to see them.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, x: Tensor, kept: tuple[nn.Parameter, nn.Parameter | None, bool]
    ) -> Tensor:
        weight, bias, transposed = ctx.kept = kept
        ctx.save_for_backward(x)
        if transposed:
            return F.linear(x, weight, bias)
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (x,), (weight, bias, transposed), (grad,) = ctx.saved_tensors, ctx.kept, grads

        def later() -> None:
            out, inner = rows(grad), rows(x)
            if weight.requires_grad:
                add_product(weight, *((out.t(), inner) if transposed else (inner.t(), out)))
            if bias is not None and bias.requires_grad:
                add_grad(bias, out.sum(0))

        _later(weight, later)
        if not ctx.needs_input_grad[1]:
            return None, None, None
        return None, grad @ (weight if transposed else weight.t()), None


class _Embedding(torch.autograd.Function):
    """A table lookup; all of its backward pass is W."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, indices: Tensor, kept: tuple[Any, ...]) -> Tensor:
        weight, padding, by_count = ctx.kept = kept
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight, padding, scale_grad_by_freq=by_count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (indices,), (weight, padding, by_count), (grad,) = ctx.saved_tensors, ctx.kept, grads
        absent = -1 if padding is None else padding

        def later() -> None:
            add_grad(
                weight,
                torch.ops.aten.embedding_dense_backward(
                    grad.contiguous(), indices, weight.shape[0], absent, by_count
                ),
            )

        _later(weight, later)
        return None, None, None


class _Convolution(torch.autograd.Function):
    """Any convolution; ``settings``: stride, padding, dilation, transposed, output padding, groups."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor | None, x: Tensor, kept: tuple[Any, ...]) -> Tensor:
        weight, bias, settings = ctx.kept = kept
        ctx.save_for_backward(x)
        return torch.convolution(x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (x,), (weight, bias, settings), (grad,) = ctx.saved_tensors, ctx.kept, grads
        sizes = None if bias is None else list(bias.shape)

        def gradients(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
                grad, x, weight, sizes, *settings, list(wanted)
            )
            return found

        def later() -> None:
            own = (weight.requires_grad, bias is not None and bias.requires_grad)
            _, of_weight, of_bias = gradients(False, *own)
            for parameter, wanted, found in zip((weight, bias), own, (of_weight, of_bias), strict=True):
                if wanted:
                    add_grad(parameter, found)

        _later(weight, later)
        return None, gradients(True, False, False)[0] if ctx.needs_input_grad[1] else None, None


def _plain(parameter: Any) -> bool:
    """Whether nothing but the optimizer and the reducer looks at the parameter's gradient: a leaf without hooks."""
    return (
        isinstance(parameter, nn.Parameter)
        and type(parameter) is nn.Parameter
        and not parameter._backward_hooks
        and only_arrivals(parameter)
    )


def _may(*parameters: Any) -> bool:
    """Whether the gradients of these may come later; some of them must want one."""
    given = [parameter for parameter in parameters if parameter is not None]
    return (
        all(map(_plain, given)) and any(p.requires_grad for p in given) and len({p.dtype for p in given}) == 1
    )


def _anchor(like: Tensor) -> Tensor:
    """Makes autograd visit an operation none of whose inputs needs a gradient."""
    return torch.empty(0, dtype=like.dtype, device=like.device, requires_grad=True)


def _apply(kind: Any, x: Tensor, kept: tuple[Any, ...]) -> Any:
    return kind.apply(None if x.requires_grad else _anchor(x), x, kept)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not _may(weight, bias) or x.dtype != weight.dtype or weight.dim() != 2:
        return NotImplemented
    return _apply(_Linear, x, (weight, bias, True))


def _matmul(x: Tensor, other: Tensor) -> Any:
    if not _may(other) or x.dtype != other.dtype or other.dim() != 2 or x.dim() < 2:
        return NotImplemented
    return _apply(_Linear, x, (other, None, False))


def _addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Any:
    if not _may(weight, bias) or x.dtype != weight.dtype or bias.dim() != 1:
        return NotImplemented
    return _apply(_Linear, x, (weight, bias, False))


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    if not _may(weight) or max_norm is not None or sparse:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _Embedding.apply(_anchor(weight), input, (weight, padding_idx, scale_grad_by_freq))


def _convolution(dims: int) -> Callable[..., Any]:
    def several(value: Any) -> list[int]:
        given = [value] if isinstance(value, int) else list(value)
        return given * dims if len(given) == 1 else given

    def convolution(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if not _may(weight, bias) or input.dtype != weight.dtype or isinstance(padding, str):
            return NotImplemented
        if input.dim() != dims + 2:
            return NotImplemented
        settings = [several(stride), several(padding), several(dilation), False, [0] * dims, groups]
        return _apply(_Convolution, input, (weight, bias, settings))

    return convolution


KNOWN: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
}
"""Function to its version with a later weight gradient, which answers ``NotImplemented`` where it cannot do it."""


class DeferWeights(TorchFunctionMode):
    """Inside, the functions of ``KNOWN`` leave the gradients of their parameters for W."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        deferred = KNOWN.get(func)
        if deferred is not None and torch.is_grad_enabled() and not _autocast() and not _paused():
            try:
                result = deferred(*args, **(kwargs or {}))
            except TypeError:  # arguments that only the function itself knows
                result = NotImplemented
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


def _paused() -> bool:
    return bool(getattr(_thread, "paused", False))


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
