"""The hooks of a parameter whose gradient has grown that are weft's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from weft.torch.pytorch.private import gradient_hooks, hooks_are_known


class Reducer(Protocol):
    """A reducer that averages gradients over the replicas as they arrive."""

    def arrived(self, number: int) -> None: ...


class Arrival:
    """Tells a reducer, as long as that exists, that the gradient of parameter ``number`` has grown."""

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


def unwatched(parameter: nn.Parameter) -> bool:
    """True if nobody but weft looks at the gradient when it grows."""
    return hooks_are_known(parameter) and not foreign_hooks(parameter)


def foreign_hooks(parameter: Tensor) -> bool:
    """True if the script has hooks that run when the gradient has grown."""
    return not all(isinstance(hook, (Arrival, Forget)) for hook in gradient_hooks(parameter))


def announce(parameter: nn.Parameter) -> None:
    """Do what autograd does after it has added to a gradient, where autograd did not add it."""
    for hook in gradient_hooks(parameter):
        hook(parameter)
