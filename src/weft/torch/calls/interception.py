"""Calls of modules, intercepted where ``nn.Module.__call__`` looks for a compiled version of the module.

That place comes before the module's hooks, needs no subclass, and stays behind when the module is copied or pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from weft.torch.pytorch.private import HOOKS, SLOT, forward_hooks, forward_pre_hooks, refuse


def intercept(module: nn.Module, call: Callable[..., Any]) -> None:
    """From now on calls of ``module`` are calls of ``call``."""
    module.__dict__[SLOT] = call


def interceptor_of(module: nn.Module) -> Any:
    """The function that calls of ``module`` run instead; ``None`` where nothing intercepts them."""
    return module.__dict__.get(SLOT)


@contextmanager
def intercepted(calls: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, calls of these modules are intercepted; afterwards they run what they ran before."""
    before = [(module, interceptor_of(module)) for module, _ in calls]
    for module, call in calls:
        intercept(module, call)
    try:
        yield
    finally:
        for module, call in before:
            if call is None:
                del module.__dict__[SLOT]
            else:
                intercept(module, call)


def with_hooks(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    wanted: Callable[[Callable[..., Any]], bool] = lambda hook: True,
) -> Any:  # fmt: skip
    """``nn.Module.__call__``'s protocol for a module's own forward hooks that are ``wanted``, around another
    ``forward``."""
    refuse(HOOKS)
    for hook, takes_kwargs in forward_pre_hooks(module):
        if not wanted(hook):
            continue
        if takes_kwargs:
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = forward(*args, **kwargs)
    for after, takes_kwargs in forward_hooks(module):
        if not wanted(after):
            continue
        if takes_kwargs:
            changed = after(module, args, kwargs, result)
        else:
            changed = after(module, args, result)
        if changed is not None:
            result = changed
    return result
