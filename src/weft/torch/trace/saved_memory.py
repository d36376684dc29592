"""The memory that autograd keeps for the backward pass, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.torch.pytorch.private import storage_key


class SavedMemory:
    """Counts each piece of memory once. Queries, keys and values are views of one memory, each a piece of its own.

    Args:
        known: Tensors whose memory does not count: parameters.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {storage_key(tensor) for tensor in known}
        self._pieces: set[tuple[int, int]] = set()
        self._counted: dict[int, int] = {}

    def add(self, tensor: Tensor) -> int:
        """The bytes that this tensor keeps and none before it; no more than there are in its memory."""
        strided = tensor.layout == torch.strided
        memory = storage_key(tensor) if strided else 0
        if memory in self._known:
            return 0
        if not strided:
            self._known.add(memory)
            return tensor.numel() * tensor.element_size()
        piece = memory, int(tensor.storage_offset())
        if piece in self._pieces:
            return 0
        self._pieces.add(piece)
        counted = self._counted.get(memory, 0)
        size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes() - counted)
        self._counted[memory] = counted + max(0, size)
        return max(0, size)
