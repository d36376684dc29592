"""Tensors to and from the files of a checkpoint."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.folder import flush_file
from weft.checkpoint.index import Entry, Index, Shard
from weft.checkpoint.names import open_inside
from weft.checkpoint.shard import check_range, describe, read_checked
from weft.errors import CheckpointError, UsageError
from weft.foreign import shown_text, translated
from weft.torch.tensors.serialise import named_dtype

# What the format has a name for; others are stored as their bytes, and the index says what they are.
NATIVE = frozenset(
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
        "uint8", "bool",
    )
)  # fmt: skip


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
    reached("write")
    raw = {path: value if value.dtype in NATIVE else as_bytes(value) for path, value in tensors.items()}
    find_safetensors().save_file(raw, folder / name)  # type: ignore[attr-defined]
    reached("flush")
    os.chmod(folder / name, 0o666 & ~_umask())
    flush_file(folder / name)
    reached("checksum")
    contents = {
        path: (str(value.dtype)[6:], tuple(value.shape), buffer_of(value)) for path, value in tensors.items()
    }
    return describe(folder, name, contents)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the same memory: uint8[numel x itemsize]."""
    return tensor.reshape(-1).view(torch.uint8)


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


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class ShardReader:
    """Reads tensors of one checkpoint, each by the range of bytes that holds it.

    ``bytes_read`` counts what came from the disk. ``verified``: all bytes have been compared with their checksums.
    """

    def __init__(self, folder: Path, index: Index, verified: bool = False) -> None:
        self.folder = folder
        self.index = index
        self.verified = verified
        self.bytes_read = 0
        self._opened: dict[str, int] = {}

    def read(self, path: str) -> Tensor:
        """The tensor of a path, on the CPU; :class:`CheckpointError` if its bytes are not those that were saved."""
        entry, descriptor = self._open(path)
        with translated(f"{entry.shard}: {shown_text(path)} cannot be read", CheckpointError):
            dtype = named_dtype(entry.dtype)
            content = read_checked(descriptor, entry, path)
            self.bytes_read += entry.size
            if not content:
                return torch.empty(entry.shape, dtype=dtype)
            return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(entry.shape)

    def check(self, path: str) -> None:
        """:class:`CheckpointError` if the bytes of a path are not those that were saved."""
        entry, descriptor = self._open(path)
        if not self.verified and not check_range(descriptor, entry.start, entry.size, entry.crc32):
            raise CheckpointError(f"{entry.shard} is altered: the bytes of {path} do not fit their checksum")

    def _open(self, path: str) -> tuple[Entry, int]:
        entry = self.index.tensors.get(path)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no tensor {shown_text(str(path))}")
        if entry.shard not in self._opened:
            self._opened[entry.shard] = open_inside(self.folder, entry.shard)
        return entry, self._opened[entry.shard]

    def close(self) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()
