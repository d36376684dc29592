"""Autograd keeps which weight it needs in the backward pass, not the weight; other tensors it keeps as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.torch.pytorch.private import PLAIN, saving_hooks
from weft.torch.tensors.kept import kept, taken


class View(NamedTuple):
    """A weight as autograd keeps it: ``of`` which one, and how it looked at its memory."""

    of: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Saving:
    """Hooks for the tensors that autograd keeps.

    Args:
        pack: What is to be kept of a weight; None for any other tensor.
        unpack: The weight.
    """

    def __init__(self, pack: Callable[[Tensor], View | None], unpack: Callable[[View], Tensor]) -> None:
        self._pack, self._unpack = pack, unpack

        def packed(tensor: Tensor) -> Any:
            return pack(tensor) or kept(tensor)

        def unpacked(known: Any) -> Tensor:
            return unpack(known) if type(known) is View else taken(known)

        setattr(unpacked, PLAIN, True)
        self._hooks = packed, unpacked

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, autograd keeps no weights. What others keep in a way of their own, such as checkpoints, they do."""
        outer = saving_hooks()
        if outer is not None and outer[0] is self._hooks[0]:
            yield
            return
        hooks = self._hooks if outer is None else self._within(*outer)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            yield

    def _within(
        self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Hooks for weights, and the given ones for all else."""

        def packed(tensor: Tensor) -> Any:
            return self._pack(tensor) or (pack(tensor),)

        def unpacked(known: Any) -> Any:
            return self._unpack(known) if type(known) is View else unpack(known[0])

        setattr(unpacked, PLAIN, getattr(unpack, PLAIN, False))
        return packed, unpacked
