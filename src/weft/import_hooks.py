"""Does something to a module as soon as it has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], None]


def when_imported(name: str, act: Act) -> None:
    """``act(module)`` once: now, or right after the module's own code has run."""
    if name in sys.modules:
        act(sys.modules[name])
        return
    finder = next((found for found in sys.meta_path if isinstance(found, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting.setdefault(name, []).append(act)


class _Finder(MetaPathFinder):
    """Finds what the other finders find, with a loader that acts afterwards."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Act]] = {}
        self._looking: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.waiting or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self, fullname)
        return spec


class _Loader(Loader):
    """The loader that was found; the module keeps that one."""

    def __init__(self, inner: Any, finder: _Finder, name: str) -> None:
        self._inner = inner
        self._finder = finder
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        for act in self._finder.waiting.pop(self._name, []):
            act(module)
