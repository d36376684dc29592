"""Where the user wants modules to be: ``with weft.partition(i):`` and ``weft.set_partition``.

A wish is kept in the module (``MARK``), so that it survives copying. The innermost one counts: a module without
one of its own goes where its parent goes, and the root to ``default_partition``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from weft.errors import PlacementError

MARK = "_weft_partition"
_contexts = threading.local()


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Modules that are created inside go to partition ``index``; of nested contexts the innermost counts.

    Ignored while ``auto_partition`` is true.
    """
    _check(index)
    stack: list[int] = _contexts.__dict__.setdefault("stack", [])
    stack.append(index)
    if len(stack) == 1:
        _contexts.original = original = nn.Module.__init__

        @functools.wraps(original)
        def marked(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if stack:
                module.__dict__[MARK] = (stack[-1], False)

        nn.Module.__init__ = marked  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            nn.Module.__init__ = _contexts.original  # type: ignore[method-assign]


def set_partition(module: nn.Module, index: int) -> None:
    """Put ``module``, and what it contains, on partition ``index``, before the first step.

    Wins over :func:`partition`; modules inside that have been set on their own stay where they were put.
    """
    _check(index)
    for child in module.modules():
        mark = child.__dict__.get(MARK)
        if mark is not None and not mark[1]:
            del child.__dict__[MARK]
    module.__dict__[MARK] = (index, True)


def _check(index: int) -> None:
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise PlacementError(f"a partition is a whole number from 0, not {index!r}")


def wishes(root: nn.Module, default: int, partitions: int) -> dict[str, int]:
    """The partition that each module of ``root`` is to go to, by name."""
    found: dict[str, int] = {}
    faults = []

    def walk(module: nn.Module, name: str, inherited: int) -> None:
        mark = module.__dict__.get(MARK)
        index = inherited if mark is None else mark[0]
        if name not in found:
            found[name] = index
            if mark is not None and index >= partitions:
                faults.append(f"{name or 'the model'} was put on partition {index}")
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name, index)

    walk(root, "", default)
    if faults:
        raise PlacementError(
            f"{'; '.join(faults)}, but there are {partitions} partitions (0 to {partitions - 1}): raise the setting "
            '"partitions" or choose another index'
        )
    return found
