"""The bytes of safetensors files: written in one pass, read and checked range by range.

The file begins with the length of its header (8 bytes, little endian) and the header, a JSON object: name ->
``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the header's end.
(https://huggingface.co/docs/safetensors: "Format")

A tensor is its dtype, its shape and its bytes as they lie in memory; a frontend makes these of its own tensors.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.checkpoint.index import ITEM_BYTES, Entry, Index, Shard
from weft.checkpoint.names import open_inside
from weft.errors import CheckpointError
from weft.untrusted import shown_text

HEADER_LIMIT_BYTES = 100_000_000
_CHUNK_BYTES = 4 << 20
_NATIVE = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
"""What every reader of the format knows; other dtypes are stored as their bytes, and the index says what they are."""


def write(
    folder: Path,
    name: str,
    tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]],
    reached: Callable[[str], None],
) -> tuple[Shard, dict[str, Entry]]:
    """Write a new file; what the index says of it. The bytes are on the disk when this returns.

    Args:
        folder: Where the file will lie.
        name: Its name.
        tensors: Path -> dtype, shape and bytes of each tensor.
        reached: Called with each phase.
    """
    reached("write")
    order = sorted(tensors, key=lambda path: (-ITEM_BYTES[tensors[path][0]], path))  # so each is aligned
    places, end = {}, 0
    for path in order:
        dtype, shape, content = tensors[path]
        native = _NATIVE.get(dtype)
        places[path] = {
            "dtype": native or "U8",
            "shape": list(shape) if native else [len(content)],
            "data_offsets": [end, end + len(content)],
        }
        end += len(content)
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    with open(folder / name, "xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for path in order:
            file.write(tensors[path][2])
        reached("flush")
        file.flush()
        os.fsync(file.fileno())
    reached("checksum")
    return describe(folder, name, tensors)


def describe(
    folder: Path, name: str, tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]]
) -> tuple[Shard, dict[str, Entry]]:
    """The entries in an index for a file that was just written.

    Args:
        folder: Where it lies.
        name: Its name.
        tensors: Path -> dtype, shape and bytes as they are in memory, from which the checksums come.
    """
    descriptor = open_inside(folder, name)
    try:
        size = os.fstat(descriptor).st_size
        header = bytes(read(descriptor, 0, 8, name))
        (length,) = struct.unpack("<Q", header)
        if length > min(HEADER_LIMIT_BYTES, size - 8):
            raise CheckpointError(f"{folder / name} has a header of {length} bytes, which cannot be")
        header += bytes(read(descriptor, 8, length, name))
    finally:
        os.close(descriptor)
    places: dict[str, Any] = json.loads(header[8:])
    entries = {}
    for path, (dtype, shape, content) in tensors.items():
        begin, end = places[path]["data_offsets"]
        entries[path] = Entry(name, dtype, shape, len(header) + begin, end - begin, zlib.crc32(content))
    return Shard(size, len(header), zlib.crc32(header)), entries


def read(descriptor: int, start: int, size: int, name: str) -> bytearray:
    """Exactly ``size`` bytes from ``start`` on."""
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = os.preadv(descriptor, [view[done : done + (1 << 30)]], start + done)
        if count == 0:
            raise CheckpointError(f"{name} is truncated: it ends at byte {start + done}, not {start + size}")
        done += count
    return content


def read_checked(descriptor: int, entry: Entry, path: str) -> bytearray:
    """A tensor's bytes; :class:`CheckpointError` if they are not those that were saved."""
    content = read(descriptor, entry.start, entry.size, entry.shard)
    if zlib.crc32(content) != entry.crc32:
        raise CheckpointError(f"{entry.shard} is altered: the bytes of {path} do not fit their checksum")
    return content


def check_range(descriptor: int, start: int, size: int, crc32: int) -> bool:
    """True if a range of a file fits its checksum; the range is never in memory as a whole."""
    found, at = 0, start
    while at < start + size:
        part = os.pread(descriptor, min(_CHUNK_BYTES, start + size - at), at)
        if not part:
            return False
        found = zlib.crc32(part, found)
        at += len(part)
    return found == crc32


class Reader:
    """Reads tensors of one checkpoint, each by the range of bytes that holds it.

    ``bytes_read`` counts what came from the disk. ``verified``: all bytes have been compared with their checksums.
    """

    def __init__(self, folder: Path, index: Index, verified: bool = False) -> None:
        self.folder = folder
        self.index = index
        self.verified = verified
        self.bytes_read = 0
        self._opened: dict[str, int] = {}

    def content(self, path: str) -> tuple[Entry, bytearray]:
        """A tensor's entry and bytes; :class:`CheckpointError` if they are not those that were saved."""
        entry, descriptor = self._open(path)
        content = read_checked(descriptor, entry, path)
        self.bytes_read += entry.size
        return entry, content

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


@dataclass
class Part:
    """Tensors by path, and JSON by section."""

    tensors: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)
