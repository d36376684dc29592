"""One step of an optimizer in several calls of its ``step()``, each for the parameters that have a gradient then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.errors import UsageError


@contextmanager
def in_calls(
    optimizer: Optimizer, setting: str, update: Callable[[], Any] | None = None
) -> Iterator[Callable[[], Any]]:
    """A function that updates the parameters that have a gradient; all its calls inside are one step.

    The optimizer's own hooks run once. Its groups, and numbers that it keeps beside the states of parameters, are as
    before the step for each call: some count steps there.

    Args:
        optimizer: The optimizer.
        setting: The setting because of which some parameters are updated after the others, for errors.
        update: Updates those that have a gradient; the optimizer's ``step()``, if not given.
    """
    kept: Any = vars(optimizer)
    before, after = kept["_optimizer_step_pre_hooks"], kept["_optimizer_step_post_hooks"]
    for hook in before.values():
        hook(optimizer, (), {})
    kept["_optimizer_step_pre_hooks"], kept["_optimizer_step_post_hooks"] = type(before)(), type(after)()
    try:
        yield _Groups(optimizer, setting, update or optimizer.step).update
    finally:
        kept["_optimizer_step_pre_hooks"], kept["_optimizer_step_post_hooks"] = before, after
    for hook in after.values():
        hook(optimizer, (), {})


class _Groups:
    """The settings of an optimizer's groups, and its own numbers, which each call finds as the first one did."""

    def __init__(self, optimizer: Optimizer, setting: str, update: Callable[[], Any]) -> None:
        self._optimizer, self._setting, self._run = optimizer, setting, update
        self._before = self._now()
        self._numbers = [_numbers(vars(optimizer)), _numbers(optimizer.state)]
        self._after: list[dict[str, Any]] | None = None

    def _now(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def update(self) -> Any:
        """Update the parameters that have gradients now.

        Raises:
            UsageError: The optimizer leaves something in a group that depends on these.
        """
        for group, before in zip(self._optimizer.param_groups, self._before, strict=True):
            for name in group.keys() - before.keys() - {"params"}:  # counts that begin with the first step
                del group[name]
            group.update(before)
        vars(self._optimizer).update(self._numbers[0])
        self._optimizer.state.update(self._numbers[1])
        result = self._run()
        after = self._now()
        if self._after is None:
            self._after = after
        for first, now in zip(self._after, after, strict=True):
            for name, value in now.items():
                if name not in first or not _alike(first[name], value):
                    raise UsageError(
                        f'{type(self._optimizer).__name__} keeps "{name}", which follows from all gradients at once, '
                        f"and {self._setting} updates some parameters after the others: leave {self._setting} out, or "
                        "take an optimizer that updates each parameter for itself"
                    )
        return result


def _numbers(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Those of an optimizer's attributes, or of its state for all parameters."""
    return {name: value for name, value in content.items() if isinstance(value, (int, float))}


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    return bool(a is b or a == b)


@contextmanager
def gradients_apart(weights: Sequence[Tensor]) -> Iterator[dict[int, Tensor | None]]:
    """Inside, the weights have no gradients, which are given by the weights' ids."""
    grads = {id(weight): weight.grad for weight in weights}
    for weight in weights:
        weight.grad = None
    try:
        yield grads
    finally:
        for weight in weights:
            weight.grad = grads[id(weight)]
