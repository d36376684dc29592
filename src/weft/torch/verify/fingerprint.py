"""Fingerprints of tensors: short lists of numbers that show how far apart two tensors are, wherever they are.

A tensor of n numbers becomes a matrix A [n / 8, 8], and its fingerprint is w A. The vector w is the same for all
tensors; its numbers lie between 0.5 and 1.5, with random signs. A fingerprint is linear, so |w A - w B| says how large
A - B is, up to a factor of about 2. Rounding changes a fingerprint by as little as it changes the tensor. Up to 8
numbers are their own fingerprint. Of a tensor with a number that is not finite, only that is known.

>>> one = fingerprint(torch.tensor([1.0, 2.0]))
>>> distance(one, fingerprint(torch.tensor([1.0, 2.5])))
0.5
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.torch.calls.placeholders import Left
from weft.torch.tensors.deferred_logits import Deferred
from weft.torch.tensors.pytree import tensors_in

COLUMNS = 8
ROWS = 1 << 17
"""How many rows of a matrix are multiplied at a time."""
SEED = 28


@dataclass(frozen=True)
class Fingerprint:
    """Shape and dtype of a tensor, whether one of its numbers is not finite, its norm, and w A (see the module)."""

    shape: tuple[int, ...]
    dtype: str
    wrong: bool
    norm: float
    sums: tuple[float, ...]

    @property
    def exact(self) -> bool:
        """True if the numbers are whole, so that nothing is rounded."""
        return not (self.dtype.startswith(("float", "bfloat", "complex")))

    def to_list(self) -> list[Any]:
        """The fingerprint as JSON has it; :meth:`from_list` reads that."""
        return [list(self.shape), self.dtype, self.wrong, self.norm, list(self.sums)]

    @classmethod
    def from_list(cls, content: list[Any]) -> Fingerprint:
        shape, dtype, wrong, norm, sums = content
        return cls(tuple(shape), dtype, wrong, norm, tuple(sums))

    def less(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of the tensors' difference."""
        sums = tuple(a - b for a, b in zip(self.sums, other.sums, strict=True))
        return Fingerprint(self.shape, self.dtype, self.wrong, math.hypot(*sums), sums)


@dataclass(frozen=True)
class Sketch:
    """A fingerprint whose numbers are still in a tensor, so that taking it reads no value."""

    shape: tuple[int, ...]
    dtype: str
    numbers: Tensor

    def read(self) -> Fingerprint:
        *sums, square = self.numbers.tolist() if self.numbers.numel() else [0.0]
        wrong = not math.isfinite(square)
        return Fingerprint(
            self.shape, self.dtype, wrong, 0.0 if wrong else math.sqrt(square), () if wrong else tuple(sums)
        )


@torch.no_grad()
def sketch(tensor: Tensor) -> Sketch:
    """The fingerprint of a tensor, not read yet.

    No torch-function mode of weft's may be on, but for the modes that look for values that are read.
    """
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)[6:]
    plain = tensor.logits.computed() if isinstance(tensor, Deferred) else tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.values() if plain.is_nested else plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    flat = plain.reshape(-1)
    numbers = flat.new_zeros(COLUMNS + 1, dtype=torch.float64)
    weights = _weights(flat.device)
    for number, chunk in enumerate(flat.split(ROWS * COLUMNS) if len(flat) > COLUMNS else [flat]):
        rows = -(-len(chunk) // COLUMNS)
        values = chunk.new_zeros(rows * COLUMNS, dtype=torch.float64)
        values[: len(chunk)] = chunk
        numbers[COLUMNS] += values @ values
        numbers[:COLUMNS] += weights[number % ROWS] * (weights[:rows] @ values.view(rows, COLUMNS))
    return Sketch(shape, dtype, numbers)


def fingerprint(tensor: Tensor) -> Fingerprint:
    """The fingerprint of a tensor."""
    return sketch(tensor).read()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """The vector w; its first number is 1."""
    generator = torch.Generator().manual_seed(SEED)
    numbers = torch.rand(ROWS, dtype=torch.float64, generator=generator) * 2 - 1
    numbers = numbers + torch.where(numbers < 0, -0.5, 0.5)
    numbers[0] = 1.0
    return numbers.to(device)


def distance(one: Fingerprint, other: Fingerprint) -> float:
    """About the norm of the two tensors' difference. Infinite if shapes differ, or if one of the two is not finite."""
    if one.shape != other.shape or one.wrong != other.wrong:
        return math.inf
    return math.hypot(*(a - b for a, b in zip(one.sums, other.sums, strict=True)))


def sketches(tree: Any) -> list[Sketch]:
    """The sketches of all tensors with data in a nested structure, in order."""
    found = [tensor for tensor in tensors_in(tree) if not isinstance(tensor, Left)]
    return [sketch(tensor) for tensor in found if tensor.device.type != "meta"]


def fingerprints(tree: Any) -> list[Fingerprint]:
    """The fingerprints of all tensors with data in a nested structure, in order."""
    return [one.read() for one in sketches(tree)]
