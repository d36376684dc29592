"""Matrix products of weft's own on a CPU, by the library that is quicker there.

PyTorch's builds for Intel and AMD processors multiply 32-bit matrices by MKL. They contain oneDNN too, which runs
convolutions and products of 16-bit numbers. On an AMD EPYC of family 26 MKL takes its code for AVX2, and oneDNN, with
AVX-512, half the time. What a model calls stays PyTorch's choice. The gradient of a weight that is taken out of the
backward pass is a product of weft's own and goes to the quicker library, which is measured once per process.

Both add up in 32 bits, in another order, as PyTorch itself does on another processor. ``torch.backends.mkldnn`` is
PyTorch's switch: where it is off, oneDNN is not used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.torch.pytorch.private import onednn_product

LEAST = 1 << 23
"""Multiplications from which on oneDNN gains more than its call costs, 15 microseconds."""
SHORTEST = 16
"""Rows, columns and lengths of sums from which on it is no slower for any shape that was tried."""
GAIN = 0.75
"""What it may take of PyTorch's time to be used: far enough from 1 that noise does not decide."""
_SIZES = 512, 256, 512
"""The product that is measured: rows and columns of the result, length of the sums."""
_TRIES = 5


def seconds(call: Callable[[], Any]) -> float:
    """The seconds that the call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class Multiplier:
    """Multiplies by oneDNN what it multiplies quicker than PyTorch, and the rest by PyTorch.

    Args:
        onednn: oneDNN's product of two matrices.
        seconds: How long a call takes.
        least: See `LEAST`.
        shortest: See `SHORTEST`.

    Attributes:
        allowed: Whether oneDNN may be used at all.
    """

    def __init__(
        self,
        onednn: Callable[[Tensor, Tensor], Tensor] = onednn_product,
        seconds: Callable[[Callable[[], Any]], float] = seconds,
        least: int = LEAST,
        shortest: int = SHORTEST,
    ) -> None:
        self.allowed = True
        self._onednn = onednn
        self._seconds = seconds
        self._least = least
        self._shortest = shortest

    def adder(self, held: Tensor, left: Tensor, right: Tensor, factor: float = 1) -> Callable[[], Any]:
        """A function that adds ``factor`` times ``left @ right``, [n, k] and [k, m], to ``held`` [n, m]."""
        if type(held) is Tensor and self._fits(left, right):
            return functools.partial(self._add, held, left, right, factor)
        return functools.partial(held.addmm_, left, right, alpha=factor)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """``left @ right``, [n, k] and [k, m]."""
        return self._onednn(left, right) if self._fits(left, right) else left @ right

    @functools.cached_property
    def onednn_is_quicker(self) -> bool:
        """By the shortest of some calls of each, in turns; not if this PyTorch lacks the operator, or has another."""
        rows, columns, length = _SIZES
        held, left, right = torch.zeros(rows, columns), torch.ones(rows, length), torch.ones(length, columns)
        usual, other = [], []
        try:
            with torch.no_grad():
                for _ in range(_TRIES):
                    usual.append(self._seconds(lambda: held.addmm_(left, right)))
                    other.append(self._seconds(lambda: self._add(held, left, right, 1)))
        except (AttributeError, RuntimeError, TypeError):
            return False
        return min(other) < GAIN * min(usual)

    def _fits(self, left: Tensor, right: Tensor) -> bool:
        """True if oneDNN can multiply these, and is quicker."""
        return (
            len(left) * right.numel() >= self._least
            and min(*left.shape, *right.shape) >= self._shortest
            and left.dtype is right.dtype is torch.float32
            and left.is_cpu
            and type(left) is type(right) is Tensor
            and _is_dense(left)
            and _is_dense(right)
            and self.allowed
            and bool(torch.backends.mkldnn.enabled)
            and self.onednn_is_quicker
        )

    def _add(self, held: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
        held.add_(self._onednn(left, right), alpha=factor)


multiplier = Multiplier()
"""That of this process."""


def adder(held: Tensor, left: Tensor, right: Tensor, factor: float = 1) -> Callable[[], Any]:
    """`Multiplier.adder` of this process."""
    return multiplier.adder(held, left, right, factor)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`Multiplier.product` of this process."""
    return multiplier.product(left, right)


def _is_dense(matrix: Tensor) -> bool:
    """Without gaps between rows or columns: for some others oneDNN only has reference code, 1000 times slower."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()
