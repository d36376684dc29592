"""Modules that `torch.compile` runs: the trace looks at them from outside only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weft.torch.pytorch.private import count_modes, is_compiled, pop_mode, push_mode


def compiles(module: nn.Module) -> bool:
    """True if calls of the module run what ``torch.compile`` has made."""
    return is_compiled(module) or hasattr(module, "_orig_mod")


def inside_compiled(root: nn.Module) -> set[str]:
    """The names of the modules inside of compiled modules."""
    tops = [name for name, module in root.named_modules() if compiles(module)]
    return {
        name
        for name, _ in root.named_modules()
        for top in tops
        if name != top and (not top or name.startswith(f"{top}."))
    }


def without_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, without the modes of the trace around it: a compiler would follow their code."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        modes = [pop_mode() for _ in range(count_modes())]
        try:
            return call(*args, **kwargs)
        finally:
            for mode in reversed(modes):
                push_mode(mode)

    return inner
