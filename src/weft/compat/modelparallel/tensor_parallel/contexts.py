"""Modules that others replace when the model is wrapped: which, by what, and with which arguments.

A registered class remembers in each of its instances what the instance was built from. Nothing else knows it later.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.errors import UsageError
from weft.torch.split.by_hand import set_tensor_parallelism as keep_or_cut
from weft.torch.split.by_hand import tensor_parallelism as split_or_whole
from weft.torch.tensors.marks import BUILT, MARK

log = logging.getLogger("weft")

Hook = Callable[..., Any]


@dataclass(frozen=True)
class _Registration:
    """The class that replaces instances of another, and how arguments and results are mapped."""

    replacement: type[nn.Module]
    init_hook: Hook | None


@dataclass
class _Built:
    """The arguments an instance was built from, and whether it is to be replaced, with which further arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    enabled: bool
    config: dict[str, Any]


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[bool, dict[str, Any]]] = [(False, {})]


_contexts = _Contexts()
_registered: dict[type[nn.Module], _Registration] = {}


@contextmanager
def tensor_parallelism(enabled: bool = True, **config: Any) -> Iterator[None]:
    """Instances of registered classes that are built inside are replaced when the model is wrapped.

    ``enabled``: False also keeps all weights of what is built inside whole on every rank.
    ``config``: arguments of the replacement, which win over those of its ``init_hook``. The innermost context counts.
    """
    _contexts.stack.append((bool(enabled), config))
    try:
        with split_or_whole(bool(enabled)):
            yield
    finally:
        _contexts.stack.pop()


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **config: Any) -> None:
    """As :func:`tensor_parallelism`, for ``module`` and what is in it, after it was built.

    ``enabled``: False also keeps all weights in it whole on every rank.
    """
    keep_or_cut(module, bool(enabled))
    for each in module.modules():
        built: _Built | None = each.__dict__.get(BUILT)
        if built is not None:
            built.enabled, built.config = bool(enabled), config


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """A decorator for the class that ``dist_module`` replaces; see :func:`tp_register_with_module`."""

    def registered(module_cls: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return registered


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> None:
    """Name what replaces instances of ``module_cls`` for which tensor parallelism is on; before they are built.

    They are replaced in ``DistributedModel(...)``, if ``tensor_parallel_degree`` is above 1. The weights are those that
    ``dist_module`` begins with: load states, and build optimizers, after that.

    Args:
        module_cls: The class. Classes derived from it are not meant.
        dist_module: A module that computes what is wanted instead.
        init_hook: Takes the arguments of ``module_cls``, gives those of ``dist_module``: ``(args, kwargs)``.
        forward_hook: The same for a call of the module.
        return_hook: Takes the replacement's result, gives the one that callers expect.

    Raises:
        UsageError: One of the two is no class of modules.
    """
    for each in (module_cls, dist_module):
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise UsageError(f"tp_register takes classes of nn.Module, not {each!r}")
    if module_cls not in _registered:
        _remember(module_cls)
    hooked = _hooked(dist_module, forward_hook, return_hook)
    _registered[module_cls] = _Registration(hooked, init_hook)


def replaced(root: nn.Module) -> nn.Module:
    """The model with replacements where they are wanted, in place; what is returned is another module if all of it is
    replaced. The outermost module wins. One that shares weights with others stays, and the log says so."""
    found: dict[int, nn.Module] = {}

    def walk(module: nn.Module, name: str) -> nn.Module:
        if id(module) not in found:
            new = found[id(module)] = _replacement(module, name, root)
            if new is module:
                for own, child in module._modules.items():
                    if child is not None:
                        module._modules[own] = walk(child, f"{name}.{own}" if name else own)
        return found[id(module)]

    return walk(root, "")


def _replacement(module: nn.Module, name: str, root: nn.Module) -> nn.Module:
    built: _Built | None = module.__dict__.get(BUILT)
    if built is None or not built.enabled:
        return module
    if _shares(module, root):
        log.info("%s is not replaced: it shares weights with other modules", name or "the model")
        return module
    registration = _registered[type(module)]
    args, kwargs = _mapped(registration.init_hook, "init_hook", built.args, built.kwargs)
    new = registration.replacement(*args, **{**kwargs, **built.config})
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
    new.to(dtype).train(module.training)
    if MARK in module.__dict__:
        new.__dict__[MARK] = module.__dict__[MARK]
    log.info("%s is replaced by a %s, with new weights", name or "the model", type(new).__name__)
    return new


def _shares(module: nn.Module, root: nn.Module) -> bool:
    """True if a parameter in ``module`` belongs to a module outside of it as well."""
    inside = {id(each) for each in module.modules()}
    own = {id(parameter) for parameter in module.parameters()}
    return any(
        id(parameter) in own
        for each in root.modules()
        if id(each) not in inside
        for parameter in each._parameters.values()
    )


def _remember(cls: type[nn.Module]) -> None:
    """Let each instance know what it is built from."""
    original = cls.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is cls:
            self.__dict__[BUILT] = _Built(args, kwargs, *_contexts.stack[-1])

    cls.__init__ = init  # type: ignore[method-assign]


def _hooked(base: type[nn.Module], forward_hook: Hook | None, return_hook: Hook | None) -> type[nn.Module]:
    """A class like ``base`` whose calls go through the hooks."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _mapped(forward_hook, "forward_hook", args, kwargs)
        result = base.forward(self, *args, **kwargs)
        return result if return_hook is None else return_hook(result)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _mapped(
    hook: Hook | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if hook is None:
        return args, kwargs
    given = hook(*args, **kwargs)
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
        raise UsageError(
            f"the {name} {getattr(hook, '__name__', hook)} gave {type(given).__name__}: return (args, kwargs), a tuple "
            "and a dict"
        )
    return tuple(given[0]), given[1]
