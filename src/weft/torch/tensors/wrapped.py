"""Tensors that are made of others: weights that torchao has quantised, say, of whole numbers and scales.

PyTorch's protocol for them is ``__tensor_flatten__``: the names of the tensors inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def is_wrapped(tensor: Tensor) -> bool:
    """True if ``tensor`` is made of others."""
    return hasattr(tensor, "__tensor_flatten__")


def plain_tensors_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory that ``tensor`` is made of; itself, if it is none of that kind."""
    if not is_wrapped(tensor):
        yield tensor
        return
    for name in _names_in(tensor):
        yield from plain_tensors_of(getattr(tensor, name))


def bytes_of(tensor: Tensor) -> int:
    """The memory of what ``tensor`` is made of."""
    return sum(each.nbytes for each in plain_tensors_of(tensor))


def replace_inside(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> None:
    """Let ``tensor``, which is made of others, be made of what ``replace`` gives for each of these."""
    for name in _names_in(tensor):
        inner = getattr(tensor, name)
        if is_wrapped(inner):
            replace_inside(inner, replace)
        else:
            setattr(tensor, name, replace(inner))


def made_like(tensor: Tensor, kind: Any, values: Iterator[Tensor]) -> Tensor:
    """A tensor of the class ``kind`` that is made as ``tensor`` is, of the next of these values."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {}
    for name in names:
        own = getattr(tensor, name)
        inner[name] = made_like(own, type(own), values) if is_wrapped(own) else next(values)
    made: Tensor = kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def _names_in(tensor: Tensor) -> list[str]:
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names
