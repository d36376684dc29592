"""``index.json``: where every tensor of a checkpoint lies, with sizes and checksums, and all that is no tensor.

Reading it trusts nothing: names stay inside the folder, ranges inside their file, sizes follow from shapes, and no
two tensors share bytes, before anything is allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.checkpoint.names import check_tag, is_safe
from weft.document import Document
from weft.errors import FormatError, UsageError
from weft.untrusted import LARGEST, MOST_DIMS, TEXT_LIMIT_BYTES, shown, shown_text

KIND, VERSION = "checkpoint", 1
LIMIT_BYTES = TEXT_LIMIT_BYTES

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One file: its size, how many bytes come before the first tensor, and the CRC-32 of these bytes."""

    size: int
    header_bytes: int
    header_crc32: int


@dataclass(frozen=True)
class Entry:
    """One tensor: ``size`` bytes from ``start`` on in the file ``shard``, and the CRC-32 of these bytes."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    crc32: int


@dataclass(frozen=True)
class Index:
    """One checkpoint.

    Attributes:
        number: Counts the saves in one place; the highest is the newest, whatever the hosts' clocks say.
        shards: Files by name.
        tensors: By path, such as ``model/layers.0.weight``.
        content: JSON values: "layout", "model", "optimizer", "ranks", "user" and so on; the frontend's matter.
    """

    tag: str
    number: int
    shards: Mapping[str, Shard]
    tensors: Mapping[str, Entry]
    content: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "weft": KIND,
                "version": VERSION,
                "tag": self.tag,
                "number": self.number,
                "shards": {
                    name: [shard.size, shard.header_bytes, shard.header_crc32]
                    for name, shard in self.shards.items()
                },
                "tensors": {
                    path: [entry.shard, entry.dtype, list(entry.shape), entry.start, entry.size, entry.crc32]
                    for path, entry in self.tensors.items()
                },
                "content": self.content,
            }
        )

    @classmethod
    def parse(cls, text: str) -> Index:
        """Read what :meth:`to_json` wrote; :class:`FormatError` names the first fault by its path."""
        document = Document.parse(text, kind=KIND, version=VERSION)
        document.only("weft", "version", "tag", "number", "shards", "tensors", "content")
        shards = {}
        for name in _members(document["shards"]):
            if not is_safe(name):
                raise FormatError(f"$.shards: {shown(name)} is no name of a file in this folder")
            size, header_bytes, crc32 = (_count(part) for part in _row(document["shards"][name], 3))
            if header_bytes > size:
                raise FormatError(f"$.shards.{name}: {header_bytes} bytes of header in a file of {size}")
            shards[name] = Shard(size, header_bytes, crc32)
        entries = document["tensors"]
        tensors = {path: _entry(entries[path], shards) for path in _members(entries)}
        _check_disjoint(tensors, shards)
        content = document["content"]
        _members(content)
        try:
            tag = check_tag(document["tag"].text())
        except UsageError as error:
            raise FormatError(f"$.tag: {error}") from error
        return cls(tag, _count(document["number"]), shards, tensors, dict(content.value))  # type: ignore[call-overload]

    def ranges(self, paths: Mapping[str, Any]) -> dict[str, list[tuple[int, int]]]:
        """The byte ranges (start, size) to read for these tensors, by file, in the order of the file."""
        found: dict[str, list[tuple[int, int]]] = {}
        for path in paths:
            entry = self.tensors[path]
            found.setdefault(entry.shard, []).append((entry.start, entry.size))
        return {shard: sorted(ranges) for shard, ranges in found.items()}


def _members(document: Document) -> list[str]:
    if not isinstance(document.value, dict):
        document.refuse("an object")
    return [str(key) for key in document.value]


def _row(document: Document, length: int) -> list[Document]:
    parts = document.items()
    if len(parts) != length:
        document.refuse(f"{length} values")
    return parts


def _count(document: Document) -> int:
    value = document.whole()
    if value < 0:
        document.refuse("a number that is not negative")
    return value


def _shape(document: Document) -> tuple[int, ...]:
    if isinstance(document.value, list) and len(document.value) > MOST_DIMS:
        document.refuse(f"up to {MOST_DIMS} dims")
    shape = tuple(_count(dim) for dim in document)
    if math.prod(max(dim, 1) for dim in shape) > LARGEST:
        document.refuse("a shape with less elements")
    return shape


def _entry(document: Document, shards: Mapping[str, Shard]) -> Entry:
    shard, dtype, shape, start, size, crc32 = _row(document, 6)
    entry = Entry(
        shard.text(),
        dtype.text(),
        _shape(shape),
        _count(start),
        _count(size),
        _count(crc32),
    )
    if entry.shard not in shards:
        shard.refuse("one of the shards")
    if entry.dtype not in ITEM_BYTES:
        dtype.refuse(f"one of {', '.join(ITEM_BYTES)}")
    needed = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if entry.size != needed:
        raise FormatError(
            f"{document.path}: {entry.dtype}{list(entry.shape)} has {needed} bytes, not {entry.size}"
        )
    file = shards[entry.shard]
    if not file.header_bytes <= entry.start <= file.size - entry.size:
        raise FormatError(f"{document.path}: it does not lie inside of {entry.shard} ({file.size} bytes)")
    return entry


def _check_disjoint(tensors: Mapping[str, Entry], shards: Mapping[str, Shard]) -> None:
    """Check that tensors fill their files without overlap and without gaps, so that checksums cover every byte."""
    ends = {name: shard.header_bytes for name, shard in shards.items()}
    for path, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != ends[entry.shard]:
            raise FormatError(
                f"$.tensors: {shown_text(path)} begins at byte {entry.start} of {entry.shard}, "
                f"where {ends[entry.shard]} is next"
            )
        ends[entry.shard] += entry.size
    for name, end in ends.items():
        if end != shards[name].size:
            raise FormatError(f"$.shards.{name}: its tensors end at byte {end} of {shards[name].size}")
