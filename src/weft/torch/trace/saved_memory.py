"""How much memory autograd keeps for the backward pass, told tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
        self._pieces: set[tuple[int, Any]] = set()  # a compiler may follow this, with numbers of its own
        self._counted: dict[int, int] = {}

    def add(self, tensor: Tensor) -> int:
        """The bytes that this tensor keeps and none before it; no more than there are in its memory."""
        strided = tensor.layout == torch.strided
        memory, start = (storage_key(tensor), tensor.storage_offset()) if strided else (0, 0)
        if memory in self._known or (memory, start) in self._pieces:
            return 0
        self._pieces.add((memory, start))
        size = tensor.numel() * tensor.element_size()
        if strided:
            size = max(0, min(size, tensor.untyped_storage().nbytes() - self._counted.get(memory, 0)))
            self._counted[memory] = self._counted.get(memory, 0) + size
        return size
