"""Autograd's graphs: running backward through them, and finding what is in them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from weft.errors import UsageError
from weft.torch.pytorch.private import (
    capture,
    gradient_hooks,
    has_backward_hooks,
    has_forward_hooks,
    has_tensor_hooks,
    hooks_are_known,
    run_engine,
)
from weft.torch.tensors.pytree import tensors_in


class Reducer(Protocol):
    """A reducer that averages gradients over the replicas as they arrive."""

    def arrived(self, number: int) -> None: ...


class Arrival:
    """Reports to a reducer, as long as that exists, that the gradient of parameter ``number`` has grown."""

    __slots__ = ("_number", "_reducer")

    def __init__(self, reducer: Reducer, number: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._number = number

    def __call__(self, parameter: Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.arrived(self._number)


class Forget:
    """Calls ``forget`` with a parameter whose gradient is not to stay: the step runs for its times or shapes."""

    __slots__ = ("_forget",)

    def __init__(self, forget: Callable[[Tensor], None]) -> None:
        self._forget = forget

    def __call__(self, parameter: Tensor) -> None:
        self._forget(parameter)


def unwatched(parameter: Tensor) -> bool:
    """True if nobody but weft looks at the gradient when it grows."""
    return hooks_are_known(parameter) and not foreign_hooks(parameter)


def foreign_hooks(parameter: Tensor) -> bool:
    """True if the script has hooks that run when the gradient has grown."""
    return not all(isinstance(hook, (Arrival, Forget)) for hook in gradient_hooks(parameter))


def has_gradient_hooks(parameter: Tensor) -> bool:
    """True if the script has hooks for the parameter's gradient, before or after it is added."""
    return has_tensor_hooks(parameter) or foreign_hooks(parameter)


def is_hooked(module: nn.Module) -> bool:
    """True if the script has hooks around the module's calls, or for gradients of its own parameters."""
    own = map(has_gradient_hooks, module.parameters(recurse=False))
    return has_forward_hooks(module) or has_backward_hooks(module) or any(own)


def announce(parameter: nn.Parameter) -> None:
    """Do what autograd does after it has added to a gradient, where autograd did not add it."""
    for hook in gradient_hooks(parameter):
        hook(parameter)


_has_gpu = functools.cache(torch.cuda.is_available)


def run_autograd(
    roots: Sequence[Any], grads: Sequence[Tensor], inputs: tuple[GradientEdge, ...] = (), keep: bool = False
) -> None:
    """The backward pass, on this thread, which knows its microbatch.

    For a GPU autograd would take a thread of its own, the same for all microbatches.

    ``roots``: tensors or gradient edges; ``grads``: their gradients, of their shapes; ``inputs``: what the pass has to
    reach, everything if empty; ``keep``: the graph is not freed.
    """
    if not roots:
        return
    before, _here.accumulates = accumulates(), True
    try:
        with torch.autograd.set_multithreading_enabled(False) if _has_gpu() else nullcontext():
            run_engine(roots, grads, inputs, keep)
    finally:
        _here.accumulates = before


class _Here(threading.local):
    accumulates = False


_here = _Here()


def accumulates() -> bool:
    """True if a backward pass goes on on this thread that adds to ``.grad``."""
    return _here.accumulates


def capture_gradients(
    roots: Sequence[Any], grads: Sequence[Tensor], inputs: Sequence[GradientEdge]
) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs``, without their graph; nothing is freed, and no ``.grad`` changes."""
    before, _here.accumulates = accumulates(), False
    try:
        return _capture(roots, grads, inputs)
    finally:
        _here.accumulates = before


def _capture(
    roots: Sequence[Any], grads: Sequence[Tensor], inputs: Sequence[GradientEdge]
) -> tuple[Tensor | None, ...]:
    with torch.autograd.set_multithreading_enabled(False) if _has_gpu() else nullcontext():
        return capture(roots, grads, inputs)


def graph_nodes(tensors: Sequence[Tensor], but: Collection[Any] = ()) -> list[Any]:
    """Every node of the graph that ``tensors`` were computed by, except those in ``but`` and behind only these."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node not in found and node not in but:
            found[node] = None
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return list(found)


def root_gradient(tensor: Tensor, grad: Tensor | None, scale: float) -> Tensor:
    """The gradient that the backward pass starts with at ``tensor``: ``scale`` times ``grad`` (1 for a scalar)."""
    if not tensor.requires_grad:
        raise UsageError("backward() got a tensor that needs no gradient: nothing it was computed from does")
    if grad is None:
        if tensor.numel() != 1:
            raise UsageError(
                f"backward() got a tensor of shape {list(tensor.shape)}; give a scalar (reduce it with .mean() or "
                ".sum()) or its gradient as grad_tensors"
            )
        return torch.full_like(tensor, scale)
    if grad.shape != tensor.shape:
        raise UsageError(
            f"backward() got a gradient of shape {list(grad.shape)} for a tensor of shape {list(tensor.shape)}"
        )
    return grad * scale if scale != 1.0 else grad


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node adds up; None for any other node."""
    found: Tensor | None = getattr(node, "variable", None)
    return found


def parameters_of(tensors: Sequence[Tensor], but: Collection[Any] = ()) -> list[nn.Parameter]:
    """The trainable parameters that are none of a model's among ``tensors`` and what these were computed from."""
    leaves = [*tensors, *(leaf_of(node) for node in graph_nodes(tensors, but))]
    outside = (one for one in leaves if getattr(one, "_weft_owner", None) is None)
    return [one for one in outside if isinstance(one, nn.Parameter)]


def refuse_outside(tensors: Sequence[Tensor], known: Collection[int] = ()) -> None:
    """Refuse a backward pass that reaches parameters which nobody averages over replicas.

    ``known``: the ids of parameters that somebody does, besides those that have an owner.
    """
    for found in parameters_of(tensors):
        # parameters of FSDP2 have no memory by then
        if id(found) not in known and found.untyped_storage().nbytes():
            raise UsageError(
                f"a trainable parameter of shape {list(found.shape)} outside of the model gets a gradient, but there "
                "are replicas on other data, and only the model's own gradients are averaged over them: make it a "
                "parameter of the module that is wrapped (one that has both the network and the loss)"
            )


def check_outside(name: str, result: Any, tensors: Sequence[Tensor]) -> None:
    """Refuse what a call on one rank has made of a trainable tensor that is none of the model's and no argument: that
    rank alone would have its gradient."""
    made = tensors_in(result)
    if not torch.is_grad_enabled():  # nothing has been made of any
        made, tensors = [tensor for tensor in made if isinstance(tensor, nn.Parameter)], ()
    for found in parameters_of(made, {tensor.grad_fn for tensor in tensors}):
        raise UsageError(
            f"{name} uses a trainable parameter of shape {list(found.shape)} which is none of the model's, so that "
            "other ranks would not know its gradient: make it a parameter of the module that is wrapped, or hand it to "
            "the module as an argument"
        )
