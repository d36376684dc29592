"""Tensors as bytes, and bytes as tensors: what channels, checkpoints and messages have in common."""

from __future__ import annotations

import ctypes

import torch

from weft.errors import TransportError


def bytes_tensor(data: bytes) -> torch.Tensor:
    """uint8 [size], in memory of its own; PyTorch's allocator aligns it (see ``channel.ALIGNMENT``)."""
    found = torch.empty(len(data), dtype=torch.uint8)
    if data:
        ctypes.memmove(found.data_ptr(), data, len(data))
    return found


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor of the CPU; NumPy need not be installed."""
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size) if size else b""


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if its elements fill its memory without gaps (in any order of dims), else a copy that does.

    So a channels-last image batch, or a transposed matrix, arrives with the strides it had.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.layout != torch.strided:
        raise TransportError(
            f"a tensor with the layout {tensor.layout} cannot be sent between ranks: use .to_dense()"
        )
    if tensor.is_contiguous():
        return tensor
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dim."""
    return tensor.as_strided((tensor.numel(),), (1,))
