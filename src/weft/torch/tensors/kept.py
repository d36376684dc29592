"""Tensors as weft's hooks keep them for autograd: what was written since is noticed, as autograd itself notices it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from weft.torch.pytorch.private import version


class Kept(NamedTuple):
    """Any other tensor that autograd keeps, and how often it had been written then."""

    tensor: Tensor
    version: int


def kept(tensor: Tensor) -> Kept:
    """The tensor without its graph, which would keep itself."""
    return Kept(tensor.detach(), version(tensor))


def taken(packed: Kept) -> Tensor:
    """The tensor that was kept, as autograd gives it.

    Raises:
        RuntimeError: It was written in the meantime.
    """
    if version(packed.tensor) != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(packed.tensor.shape)} is at version {version(packed.tensor)}; expected version "
            f"{packed.version} instead"
        )
    return packed.tensor
