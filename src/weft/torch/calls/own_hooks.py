"""Forward hooks that write what their module computes with, and so run where it does.

A hook of a unit is glue: every rank runs it, so that what it collects is collected everywhere. A hook like that of
``torch.nn.utils.spectral_norm`` is a part of the module, though: it writes a buffer, or an attribute that ``forward``
reads, and between hook and ``forward`` another microbatch may get the turn. The trace finds such hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.torch.calls.attributes import Attribute
from weft.torch.pytorch.private import forward_hook_tables, has_backward_hooks, no_torch_function
from weft.torch.tensors.marks import is_new, noted

HOOK = "<hook>"
"""Stands below a module's name for the hook that runs there."""


@dataclass
class Seen:
    """The effects of one hook.

    ``wrote_buffer``: one of its module. ``wrote``: attributes, by module and name. ``changed``: it changed what the
    module gets or returns.
    """

    name: str
    before: bool
    wrote_buffer: bool = False
    wrote: frozenset[tuple[str, str]] = frozenset()
    changed: bool = False


class Hooks:
    """The hooks that run while :meth:`watched` is active, by the names of their modules in ``root``."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._running: list[str] = []
        self._seen: dict[str, list[Seen]] = {}

    def user(self, module: str) -> str:
        """The name of the code that runs: that of ``module``, or its hook's."""
        return f"{module}.{HOOK}".lstrip(".") if self._running[-1:] == [module] else module

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, each module's forward hooks are watched. With backward hooks, all of a unit's hooks run with it."""
        kept: list[tuple[dict[int, Any], int, Any]] = []
        for name, module in self._root.named_modules():
            tables = forward_hook_tables(module)
            if any(tables) and not has_backward_hooks(module):
                names = hook_names(module)
                for before, table in zip((True, False), tables, strict=True):
                    for number, hook in table.items():
                        seen = Seen(names[id(hook)], before)
                        self._seen.setdefault(name, []).append(seen)
                        kept.append((table, number, hook))
                        table[number] = self._watch(module, name, hook, seen)
        try:
            yield
        finally:
            for table, number, hook in kept:
                if number in table:
                    table[number] = hook

    def _watch(
        self, module: nn.Module, name: str, hook: Callable[..., Any], seen: Seen
    ) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            state = State(module)
            self._running.append(name)
            try:
                result = hook(*args)
            finally:
                self._running.pop()
            seen.changed |= result is not None
            seen.wrote_buffer |= state.buffers_differ()
            seen.wrote |= {(f"{name}.{inner}".strip("."), key) for inner, key in state.attributes_written()}
            return result

        return watched

    def own(self, attributes: Iterable[Attribute]) -> dict[str, tuple[str, ...]]:
        """The names of the hooks that run with their module, by module.

        They write its buffers, or ``attributes`` that its code uses and nothing outside of it does. Where such a hook
        changes what the module gets, the hooks between it and ``forward`` come along.
        """
        used = {
            each.place: each for each in attributes if not all(user.endswith(HOOK) for user in each.users)
        }
        found = {}
        for name, hooks in self._seen.items():
            own = [
                hook.wrote_buffer or any(place in used and used[place].inside(name) for place in hook.wrote)
                for hook in hooks
            ]
            changing = [number for number, hook in enumerate(hooks) if own[number] and hook.changed]
            first = min((n for n in changing if hooks[n].before), default=len(hooks))
            last = max((n for n in changing if not hooks[n].before), default=-1)
            inner = [
                hook.name
                for number, hook in enumerate(hooks)
                if own[number] or (number > first if hook.before else number < last)
            ]
            if inner:
                found[name] = tuple(inner)
        return found


class State:
    """The buffers and attributes of a module and what is in it, at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        with no_torch_function():
            self._buffers = noted(module)
        self._attributes = {name: dict(vars(each)) for name, each in module.named_modules()}

    def buffers_differ(self) -> bool:
        """True if a buffer has been written or replaced since."""
        now = dict(self._module.named_buffers())
        with no_torch_function():
            return any(
                name not in self._buffers or is_new(b, *self._buffers[name]) for name, b in now.items()
            )

    def attributes_written(self) -> set[tuple[str, str]]:
        """Module and name of the attributes that hold something else now."""
        return {
            (name, key)
            for name, each in self._module.named_modules()
            for key, value in vars(each).items()
            if name in self._attributes and self._attributes[name].get(key, self) is not value
        }


def hook_names(module: nn.Module) -> dict[int, str]:
    """Names for the module's forward hooks, by id: those of their functions or classes, and numbers among the same."""
    names: dict[int, str] = {}
    counts: Counter[str] = Counter()
    for table in forward_hook_tables(module):
        for hook in table.values():
            kind = hook if hasattr(hook, "__qualname__") else type(hook)
            name = f"{kind.__module__}.{kind.__qualname__}"
            names[id(hook)] = f"{name} {counts[name]}"
            counts[name] += 1
    return names


def find_hooks(module: nn.Module, names: Iterable[str]) -> list[Callable[..., Any]]:
    """The module's forward hooks of these ``names``."""
    wanted = set(names)
    numbers = {number for number, name in hook_names(module).items() if name in wanted}
    return [hook for table in forward_hook_tables(module) for hook in table.values() if id(hook) in numbers]
