"""Many tensors as one flat tensor for each type: what is sent over a network goes faster in one piece.

Each begins at an address that TensorFlow takes over, so that a result is a view of the flat tensor, not a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.tensorflow.session.wire import from_torch, to_torch
from weft.transport.channel import ALIGNMENT


class Flat:
    """Tensors of TensorFlow, copied into one torch tensor for each type.

    ``scale``: what they are multiplied by on the way.

    Attributes:
        parts: The flat tensors, in the order in which their types come up.
    """

    def __init__(self, tensors: Sequence[Any], scale: float = 1.0) -> None:
        given = [to_torch(tensor) for tensor in tensors]
        self._places: list[tuple[torch.dtype, int, tuple[int, ...]]] = []
        sizes: dict[torch.dtype, int] = {}
        for tensor in given:
            begin = sizes.get(tensor.dtype, 0)
            self._places.append((tensor.dtype, begin, tuple(tensor.shape)))
            step = ALIGNMENT // tensor.itemsize
            sizes[tensor.dtype] = begin + -(-tensor.numel() // step) * step
        self._flats = {dtype: torch.empty(size, dtype=dtype) for dtype, size in sizes.items()}
        for tensor, (dtype, begin, _) in zip(given, self._places, strict=True):
            flat, end = self._flats[dtype], begin + tensor.numel()
            if scale == 1.0:
                flat[begin:end].copy_(tensor.reshape(-1))
            else:
                torch.mul(tensor.reshape(-1), scale, out=flat[begin:end])
            flat[end : end + -tensor.numel() % (ALIGNMENT // tensor.itemsize)].zero_()

    @property
    def parts(self) -> list[torch.Tensor]:
        return list(self._flats.values())

    def tensors(self) -> list[Any]:
        """The tensors again, as TensorFlow's, in the memory of the flat ones: nobody writes there from now on."""
        return [
            from_torch(self._flats[dtype][begin : begin + _numel(shape)].view(shape))
            for dtype, begin, shape in self._places
        ]


def _numel(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
