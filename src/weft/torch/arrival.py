"""The hooks by which a parameter says that its gradient has grown, or is about to."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn


class Arrival:
    """Tells a reducer, as long as that exists, that the gradient of parameter ``number`` has grown."""

    __slots__ = ("_number", "_reducer")

    def __init__(self, reducer: Any, number: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._number = number

    def __call__(self, parameter: Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.arrived(self._number)


class Settle:
    """Waits until the sum that works on the gradient is done (``bucket.wait()``), before the gradient grows."""

    __slots__ = ("_bucket",)

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    def __call__(self, grad: Tensor | None) -> None:
        self._bucket.wait()


def only_settles(parameter: nn.Parameter) -> bool:
    """Whether nobody but reducers looks at what is about to be added to the gradient."""
    hooks = parameter._backward_hooks
    return not hooks or all(type(hook) is Settle for hook in hooks.values())


def prepare(parameter: nn.Parameter) -> None:
    """Do what autograd does before it adds to a gradient, where autograd does not add it."""
    for hook in list((parameter._backward_hooks or {}).values()):
        if type(hook) is Settle:
            hook(None)


def only_arrivals(parameter: nn.Parameter) -> bool:
    """Whether nobody but reducers looks at the gradient when it grows."""
    hooks = parameter._post_accumulate_grad_hooks
    return not hooks or all(type(hook) is Arrival for hook in hooks.values())


def announce(parameter: nn.Parameter) -> None:
    """Do what autograd does after it has added to a gradient, where autograd did not add it."""
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
