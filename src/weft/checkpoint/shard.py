"""The bytes of safetensors files: which range holds which tensor, read and checked range by range.

The file begins with the length of its header (8 bytes, little endian) and the header, a JSON object: name ->
``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the header's end.
(https://huggingface.co/docs/safetensors: "Format")
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.index import Entry, Shard
from weft.checkpoint.names import open_inside
from weft.errors import CheckpointError

HEADER_LIMIT_BYTES = 100_000_000
_CHUNK_BYTES = 4 << 20


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
    """Whether a range of a file fits its checksum; the range is never in memory as a whole."""
    found, at = 0, start
    while at < start + size:
        part = os.pread(descriptor, min(_CHUNK_BYTES, start + size - at), at)
        if not part:
            return False
        found = zlib.crc32(part, found)
        at += len(part)
    return found == crc32
