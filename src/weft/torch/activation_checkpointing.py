"""Activation checkpointing: less memory, for a second run of the forward pass (Chen et al., arXiv 1604.06174).

PyTorch's own ``torch.utils.checkpoint`` does the work, and may be called directly as well. What it wraps may be spread
over partitions: then each unit inside is checkpointed by itself, on the rank that runs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from weft.errors import UsageError
from weft.torch.execution.glue import running
from weft.torch.interceptions import install
from weft.torch.session.offload import offloading
from weft.torch.tensors.marks import CHECKPOINTED, PLAIN_FORWARD


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """``module(*args, **kwargs)``, whose activations are not kept but computed again in the backward pass.

    ``preserve_rng_state``: dropout draws the same numbers the second time.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"checkpoint() takes a module, not a {type(module).__name__}: for a function call "
            "torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)"
        )
    return _run(module, args, kwargs, preserve_rng_state)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Run the children of an ``nn.Sequential`` one after another, checkpointed in groups.

    ``strategy``: ``each`` child for itself; ``contiguous``: all in one group; ``group_N``: N in a row. Where a group
    has children on several partitions, each of its units is a group of its own. ``pack_args_as_tuple``: a tuple
    that a child returns is its successor's one argument; otherwise it is unpacked into several.
    """
    if not isinstance(sequential, nn.Sequential):
        raise UsageError(
            f"checkpoint_sequential() takes an nn.Sequential, not a {type(sequential).__name__}: call "
            "checkpoint() for it"
        )
    children = list(sequential)
    result = input
    for group in grouped(len(children), strategy):
        chain = _chain([children[at] for at in group], pack_args_as_tuple)
        result = _run(chain, (result,), {}, preserve_rng_state)
    return result


def grouped(count: int, strategy: str) -> list[range]:
    """The groups that a strategy makes of ``count`` children.

    >>> grouped(5, "group_2")
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    found = re.fullmatch(r"each|contiguous|group_([1-9]\d*)", strategy)
    if found is None:
        raise UsageError(
            f'the strategy {strategy!r} is not known: write "each", "contiguous" or "group_2" (any number)'
        )
    length = 1 if strategy == "each" else max(count, 1) if strategy == "contiguous" else int(found[1])
    return [range(start, min(start + length, count)) for start in range(0, count, length)]


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """From now on, calls of ``module`` are checkpointed; for models that you cannot edit.

    The last two arguments are for ``nn.Sequential``, see :func:`checkpoint_sequential`. A module without
    a ``forward``, an ``nn.ModuleList`` say, is never called: calls of each module in it are checkpointed.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"set_activation_checkpointing() takes a module, not a {type(module).__name__}")
    grouped(1, strategy)
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        for child in module.children():
            set_activation_checkpointing(child, preserve_rng_state, pack_args_as_tuple, strategy)
        return
    known = CHECKPOINTED in module.__dict__
    module.__dict__[CHECKPOINTED] = (preserve_rng_state, pack_args_as_tuple, strategy)
    if not known:
        own = module.__dict__.get("forward")
        if own is not None:
            module.__dict__[PLAIN_FORWARD] = own
        module.__dict__["forward"] = MethodType(_forward, module)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands for the module's ``forward``; a bound method, so that a copied module has its own."""
    preserve, pack, strategy = module.__dict__[CHECKPOINTED]
    if isinstance(module, nn.Sequential) and len(args) == 1 and not kwargs:
        return checkpoint_sequential(module, args[0], strategy, preserve, pack)
    plain = module.__dict__.get(PLAIN_FORWARD) or MethodType(type(module).forward, module)
    return _run(plain, args, kwargs, preserve)


def _chain(children: list[nn.Module], pack: bool) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for child in children:
            value = child(*value) if isinstance(value, tuple) and not pack else child(value)
        return value

    return run


def _run(function: Callable[..., Any], args: Any, kwargs: Any, preserve_rng_state: bool) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if running() is not None:
        install()
        return torch_checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )
    with offloading():
        return torch_checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )
