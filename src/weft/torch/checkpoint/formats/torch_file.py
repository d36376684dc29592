"""Files of ``torch.save``: read as weights only, after a look at what they claim.

Such a file is a zip archive with a checksum for each tensor, which ``torch.load`` does not look at; here they are
compared. Files of versions before 1.6 are no archives and have none.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.untrusted import cut, reason, regular, translated

_CHUNK_BYTES = 4 << 20
_LARGER = 4
"""How many times the size of a file its content may have: an archive may be compressed, but no bomb."""
_OLD_PICKLES = 5
"""How many pickles a file has that is no archive: a number, the version, the system, the content, the storages."""
_LONGEST_NAME = 1000


def read_torch_file(file: Any, **options: Any) -> Any:
    """``torch.load``, without the warning of PyTorch 2.14 and later that it checks sparse tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        return torch.load(file, **options)


def load_file(path: Path, allow_pickle: bool = False, **options: Any) -> Any:
    """The object in a file of ``torch.save``; tensors stay in the file until they are used, if the file allows that."""
    options.setdefault("map_location", "cpu")
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    with translated(f"{path} is no whole file of torch.save", CheckpointError):
        try:
            with open(regular(path), "rb") as file:
                held = check_archive(file)
                check_names(file)
            try:
                content = read_torch_file(path, weights_only=not allow_pickle, mmap=True, **options)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                content = read_torch_file(path, weights_only=not allow_pickle, **options)
        except PermissionError as error:
            raise CheckpointError(f"{path} cannot be read by this user: give it the right to read") from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} is damaged, or holds objects whose loading runs code: it was not loaded ({reason(error)}). If "
                "you trust whoever wrote it, pass allow_pickle=True"
            ) from error
        if not allow_pickle:
            check_sizes(content, held)
        return content


def is_archive(path: Path) -> bool:
    """True if a file is of PyTorch 1.6 or later, with checksums."""
    return zipfile.is_zipfile(path)


def load_bytes(content: bytes) -> Any:
    """The object in bytes of ``torch.save``; some error if they are damaged."""
    held = check_archive(io.BytesIO(content))
    check_names(io.BytesIO(content))
    found = read_torch_file(io.BytesIO(content), weights_only=True, map_location="cpu")
    check_sizes(found, held)
    return found


def check_archive(file: IO[bytes]) -> int:
    """The number of bytes that an archive holds; :class:`ValueError` if one of its checksums is wrong."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if not zipfile.is_zipfile(file):
        return size
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        held = sum(entry.file_size for entry in entries)
        if held > _LARGER * size:
            raise ValueError(f"it has {size} bytes and claims to hold {held}")
        if any(entry.CRC for entry in entries):  # else torch was asked to write none
            for entry in entries:
                _check(archive, entry)
    return held


def _check(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    found = 0
    try:
        with archive.open(entry) as part:
            while content := part.read(_CHUNK_BYTES):
                found = zlib.crc32(content, found)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{entry.filename} in it is altered: it does not fit its checksum") from error


def check_names(file: IO[bytes]) -> None:
    """Check that the pickles of a file name nothing that is longer than a name.

    PyTorch would put such a name into an error, and look through that with a pattern that takes for ever.
    """
    file.seek(0)
    if not zipfile.is_zipfile(file):
        file.seek(0)
        for _ in range(_OLD_PICKLES):
            _check_pickle(file)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("data.pkl"):
                del entry.CRC  # it was compared, or there is none
                with archive.open(entry) as part:
                    _check_pickle(io.BytesIO(part.read()))


def _check_pickle(file: IO[bytes]) -> None:
    for operation, argument, _ in pickletools.genops(file):
        if operation.name in ("GLOBAL", "INST") and len(str(argument)) > _LONGEST_NAME:
            raise ValueError(f"it names what no program calls so: {cut(str(argument), 60)}")


def check_sizes(content: Any, held: int) -> None:
    """Check that tensors have no more bytes than their file.

    PyTorch would make larger ones, with numbers that happen to be in memory.
    """
    storages = {}
    for tensor in _tensors(content):
        if tensor.layout == torch.strided and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    taken = sum(storages.values())
    if taken > held:
        raise ValueError(f"its tensors claim {taken} bytes, it holds {held}")


def _tensors(content: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, each container once."""
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
