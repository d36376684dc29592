"""A folder of ``torch.distributed.checkpoint``, read tensor by tensor; nothing in it is believed.

    .metadata         a pickle: for each tensor its dtype, its shape, the chunks that it was saved in, and where
                      each of them lies: file, offset, length
    __0_0.distcp      such chunks, one after the other, each as ``torch.save`` writes a tensor

The metadata is read as plain values (see ``plain_pickle``). Before a tensor is made, its chunks have to fill it
exactly, and to lie inside of their files; each chunk has to have the dtype and shape that the metadata says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.names import is_safe
from weft.checkpoint.plain_pickle import Name, Record, read_pickle
from weft.communication.serialise import named_dtype
from weft.errors import CheckpointError
from weft.torch.checkpoint.formats.torch_file import load_bytes
from weft.untrusted import LARGEST, MOST_DIMS, read_limited, regular, shown_text, translated

METADATA = ".metadata"
_LIMIT_BYTES = 1 << 30

Shape = tuple[int, ...]


class _Chunk(NamedTuple):
    """A block of a tensor, and its place in a file."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


class _Saved(NamedTuple):
    """A tensor as the metadata describes it."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[_Chunk]


class DistributedFolder:
    """The tensors of a folder.

    ``shapes``: their shapes by key, checked against the files. ``paths``: by key, the keys of the nested dicts in which
    a tensor was saved, as far as the metadata says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        fault = "is damaged, or holds what does not belong into a checkpoint's metadata; nothing of it ran"
        with translated(f"{folder / METADATA} {fault}", CheckpointError):
            with open(regular(folder / METADATA), "rb") as file:
                content = read_limited(file, _LIMIT_BYTES)
            if len(content) > _LIMIT_BYTES:
                raise ValueError(f"it has more than {_LIMIT_BYTES} bytes")
            metadata = read_pickle(content, _known)
            if not isinstance(metadata, Record) or metadata.name != "Metadata":
                raise ValueError("it is no Metadata")
            entries = metadata.get("state_dict_metadata", dict)
            places = _places(metadata.state.get("storage_data") or {})
            self._saved = {
                key: _saved(key, entry, places)
                for key, entry in entries.items()
                if isinstance(entry, Record) and entry.name == "TensorStorageMetadata"
            }
            self.keys = list(map(str, entries))
            self._ends: dict[str, int] = {}
            """Where the last thing in each file ends, which is its size as it was written."""
            for name, start, length in places.values():
                self._ends[name] = max(self._ends.get(name, 0), start + length)
            planned = metadata.state.get("planner_data")
            self.paths = {key: _path(planned, key) for key in self._saved}
        self.shapes: Mapping[str, Shape] = {key: saved.shape for key, saved in self._saved.items()}
        self._check_files()

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        for key, (dtype, shape, chunks) in self._saved.items():
            for chunk in chunks:
                if not is_safe(chunk.file):
                    raise CheckpointError(
                        f"{self.folder / METADATA} names {shown_text(chunk.file)!r}, which is no file in its folder"
                    )
                with translated(f"{self.folder / chunk.file} cannot be read", CheckpointError):
                    size = sizes.setdefault(chunk.file, regular(self.folder / chunk.file).stat().st_size)
                if chunk.start + chunk.length > size:
                    raise CheckpointError(
                        f"{self.folder / chunk.file} is truncated: it has {size} bytes, and {shown_text(key)} would "
                        f"lie at {chunk.start} to {chunk.start + chunk.length}"
                    )
            claimed, held = math.prod(shape) * dtype.itemsize, sum(chunk.length for chunk in chunks)
            if claimed > held:
                raise CheckpointError(
                    f"{self.folder}: {shown_text(key)} claims {claimed} bytes, its files hold {held}: do not use it"
                )

    def doubts(self) -> list[str]:
        """Signs that files are not of the save that wrote the metadata, which it writes last."""
        found = []
        written = (self.folder / METADATA).stat().st_mtime
        for name, end in self._ends.items():
            with translated(f"{self.folder / name} cannot be read", CheckpointError):
                status = (self.folder / name).stat()
            if status.st_size > end:
                found.append(f"{name} has {status.st_size - end} bytes more than {METADATA} says")
            elif status.st_mtime > written:
                found.append(f"{name} is {status.st_mtime - written:.3g} s newer than {METADATA}")
        there = {each.name for each in self.folder.glob("*.distcp")}
        return found + [f"{name} is not in {METADATA}" for name in sorted(there - self._ends.keys())]

    def read(self, key: str) -> Tensor:
        """The tensor of a key, on the CPU."""
        dtype, shape, chunks = self._saved[key]
        with translated(f"{self.folder}: {shown_text(key)} cannot be read", CheckpointError):
            target = torch.empty(shape, dtype=dtype)
            for chunk in chunks:
                with open(self.folder / chunk.file, "rb") as file:
                    file.seek(chunk.start)
                    value = load_bytes(file.read(chunk.length))
                if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != chunk.sizes:
                    raise ValueError(f"{chunk.file} has something else at byte {chunk.start}")
                block = target
                for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    block = block.narrow(dim, offset, size)
                block.copy_(value.detach())
        return target


def _known(module: str, name: str) -> Any:
    """A placeholder for a class or function that the metadata names; `ValueError` for what does not belong there."""
    if name in _RECORDS.get(module, ()):
        return Name(name, None)
    if (module, name) == ("torch", "Size"):
        return Name("Size", _size)
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return named_dtype(name)
    raise ValueError(f"{shown_text(f'{module}.{name}')} does not belong there")


_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},  # as Python 3.13 calls it
}  # fmt: skip


def _size(dims: Sequence[int] = ()) -> Shape:
    if len(dims) > MOST_DIMS or not all(type(dim) is int and 0 <= dim <= LARGEST for dim in dims):
        raise ValueError("a shape has too many dims, or one that cannot be")
    if math.prod(max(dim, 1) for dim in dims) > LARGEST:
        raise ValueError("a shape has more elements than can be")
    return tuple(dims)


def _places(found: Any) -> dict[tuple[str, Shape], tuple[str, int, int]]:
    """File, start and length of each chunk, by its tensor and offsets."""
    if not isinstance(found, dict):
        raise ValueError("storage_data is no dict")
    places = {}
    for index, info in found.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise ValueError("storage_data has other things than places")
        if info.state.get("transform_descriptors"):
            raise ValueError(
                "its files are compressed, or changed in another way, by an extension of PyTorch's"
            )
        start, length = info.get("offset", int), info.get("length", int)
        if start < 0 or length < 0:
            raise ValueError("a place is negative")
        offsets = index.state.get("offset") or ()
        places[index.get("fqn", str), tuple(offsets)] = info.get("relative_path", str), start, length
    return places


def _saved(key: Any, entry: Record, places: Mapping[tuple[str, Shape], tuple[str, int, int]]) -> _Saved:
    name = shown_text(str(key))
    properties, shape = entry.get("properties", Record), entry.get("size", tuple)
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    chunks = []
    for chunk in entry.get("chunks", list):
        offsets, sizes = chunk.get("offsets", tuple), chunk.get("sizes", tuple)
        if (key, offsets) not in places:
            raise ValueError(f"a chunk of {name} is nowhere")
        chunks.append(_Chunk(offsets, sizes, *places[key, offsets]))
    if not _fill(shape, chunks):
        raise ValueError(f"the chunks of {name} do not fill it, or lie in each other")
    return _Saved(dtype, shape, chunks)


def _fill(shape: Shape, chunks: Sequence[_Chunk]) -> bool:
    """True if blocks cover every element of a tensor exactly once.

    They do if all lie inside the tensor, have as many elements as the tensor together, and no two overlap.
    """
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return False
        if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return False
    full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in full) != math.prod(shape):
        return False
    dims = range(len(shape))
    most = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in full}), default=0)
    if not shape:
        return len(full) == 1
    full.sort(key=lambda chunk: chunk.offsets[most])  # so that few have to be compared
    for number, one in enumerate(full):
        for other in full[number + 1 :]:
            if other.offsets[most] >= one.offsets[most] + one.sizes[most]:
                break
            if all(
                one.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                and other.offsets[dim] < one.offsets[dim] + one.sizes[dim]
                for dim in dims
            ):
                return False
    return True


def _path(planned: Any, key: str) -> tuple[str, ...]:
    path = planned.get(key) if isinstance(planned, dict) else None
    if isinstance(path, tuple) and all(isinstance(part, (str, int)) for part in path):
        return tuple(map(str, path))
    return ()
