"""Tensors to and from the files of a checkpoint."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.index import Entry, Shard
from weft.checkpoint.shard import Reader, write
from weft.communication.serialise import named_dtype
from weft.errors import CheckpointError, UsageError
from weft.untrusted import shown_text, translated


def find_safetensors() -> object:
    """The module ``safetensors.torch``; :class:`UsageError` if it is not installed."""
    try:
        import numpy  # noqa: F401  # which it needs
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            f'checkpoints need the packages safetensors and numpy: pip install "weft[torch]" ({error})'
        ) from error
    return safetensors.torch


def stage(tensors: Mapping[str, Tensor], copy: bool) -> dict[str, Tensor]:
    """The tensors on the CPU, each contiguous in memory of its own; with ``copy`` also apart from the given ones."""
    result: dict[str, Tensor] = {}
    storages: set[int] = set()
    for path, tensor in tensors.items():
        value = tensor.detach()
        if value.layout != torch.strided or value.is_quantized:
            raise UsageError(
                f"{path} is a {value.layout} tensor, which a checkpoint cannot hold: convert it first"
            )
        value = value.to("cpu", copy=True) if copy else value.cpu()
        value = value.resolve_conj().resolve_neg().contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != value.numel() * value.element_size():
            value = value.clone(memory_format=torch.contiguous_format)
        storages.add(value.untyped_storage().data_ptr())
        result[path] = value
    return result


def write_shard(
    folder: Path, name: str, tensors: Mapping[str, Tensor], reached: Callable[[str], None]
) -> tuple[Shard, dict[str, Entry]]:
    """Write a file of staged tensors; what the index says of the file, which is on the disk when this returns."""
    contents = {
        path: (str(value.dtype)[6:], tuple(value.shape), buffer_of(value)) for path, value in tensors.items()
    }
    return write(folder, name, contents, reached)


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, on the same memory: the tensor must live as long as they are used.

    NumPy would do this too, but need not be installed.
    """
    size = tensor.numel() * tensor.element_size()
    return (
        memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        if size
        else memoryview(b"")
    )


class ShardReader(Reader):
    """Reads tensors of one checkpoint, each by the range of bytes that holds it."""

    def read(self, path: str) -> Tensor:
        """The tensor of a path, on the CPU; :class:`CheckpointError` if its bytes are not those that were saved."""
        with translated(f"{shown_text(str(path))} cannot be read", CheckpointError):
            entry, content = self.content(path)
            dtype = named_dtype(entry.dtype)
            if not content:
                return torch.empty(entry.shape, dtype=dtype)
            return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(entry.shape)
