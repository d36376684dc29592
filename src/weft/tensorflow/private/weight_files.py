"""Files of weights of Keras 3 (``.weights.h5``, ``.weights.json``, ``.keras``), read one tensor at a time.

Keras finds by itself which tensor of a file is whose. Its store gives it a :class:`Stored` in place of an array: shape
and type. A variable of this rank reads the values at once, one that waits reads them when it is made.
"""

from __future__ import annotations

import functools
import io
import os
import struct
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h5py
import keras
import ml_dtypes
import numpy as np
from keras.src.saving import saving_lib

from weft.tensorflow.private.variables import delays, underlying, waiting, waits

Target = Callable[[Any], Any]
"""The variable that takes a value that a file has for a given one; None if another rank has it."""
_reading: list[bool] = []


class UnreadableTensor(OSError):
    """A tensor of a file is damaged, or the file has changed since it was opened."""


class Stored(np.lib.mixins.NDArrayOperatorsMixin):
    """A tensor in a file: an array for whoever takes it for one, which is read each time."""

    def __init__(self, file: KeptFile, dataset: Any) -> None:
        kind = dataset.dtype if dataset.attrs.get("dtype") != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
        self.shape, self.ndim, self.dtype = dataset.shape, dataset.ndim, kind
        self.encoded = dataset.chunks is not None  # and may be damaged: plain bytes are there or not
        self._file, self._name = file, dataset.name

    def array(self) -> np.ndarray[Any, Any]:
        """Its values.

        Raises:
            UnreadableTensor: The file has changed since it was opened, or is damaged.
        """
        return self._file.read(self._name, self.shape, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.array(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(
            *(each.array() if isinstance(each, Stored) else each for each in inputs), **options
        )

    def __getitem__(self, key: Any) -> Any:
        return self.array()[key]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.array(), name)


class KeptFile:
    """A file that stays open while tensors of it are wanted: it may be gone, or another one, under its name."""

    def __init__(self, path: str, member: zipfile.ZipInfo | None = None) -> None:
        self.faults: list[UnreadableTensor] = []  # of which Keras makes errors of its own, or warnings
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self._before = self._version()
        self.start, self.length = 0, self._before[2]
        if member is not None:
            header = os.pread(self.descriptor, 30, member.header_offset)
            names = sum(struct.unpack("<HH", header[26:]))
            self.start, self.length = member.header_offset + 30 + names, member.file_size

    def open(self) -> Any:
        """Its content as an open file, with a position of its own."""
        return io.BufferedReader(_Content(self))

    def read(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        try:
            if self._version() != self._before:
                raise ValueError("the file has changed since load_weights")
            with self.open() as file, h5py.File(file, "r") as store:
                dataset = saving_lib.safe_get_h5_dataset(store, name.lstrip("/"))
                if dataset.dtype == dtype:
                    return np.asarray(dataset[()]).reshape(shape)
                return np.array(dataset, dtype=dtype).reshape(shape)
        except Exception as error:
            self.faults.append(
                UnreadableTensor(f"no weights can be read from {self.path} at {name}: {error}")
            )
            raise self.faults[-1] from error

    def _version(self) -> tuple[int, ...]:
        found = os.fstat(self.descriptor)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _Content(io.RawIOBase):
    """The content of a kept file."""

    def __init__(self, file: KeptFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        file, left = self._file, max(self._file.length - self._at, 0)
        count = os.preadv(file.descriptor, [memoryview(buffer)[:left]], file.start + self._at)
        self._at += count
        return count


@contextmanager
def values_checked(target: Target) -> Iterator[None]:
    """Inside, what Keras loads is compared with the variables, and changes none: its errors come before it loads."""

    def look(variable: Any, value: Any) -> None:
        if isinstance(value, Stored) and value.encoded and not waits(variable):
            value.array()

    with warnings.catch_warnings(), _values_go(target, look):
        warnings.simplefilter("ignore")  # they come when it loads
        yield


@contextmanager
def values_taken(target: Target) -> Iterator[None]:
    """Inside, the variables of this rank take what Keras loads; those that wait, when they are made.

    Raises:
        UnreadableTensor: Some variables have other values already.
    """
    assign, convert = keras.Variable._direct_assign, keras.Variable._convert_to_tensor

    def give(variable: Any, value: Any) -> None:
        kept = underlying(variable)
        if isinstance(value, Stored) and waits(kept) and not kept.is_initialized():
            kept.take_later(functools.partial(_made, value, variable._dtype))
            return
        if isinstance(value, Stored):
            value = convert(variable, value.array(), dtype=variable._dtype)
        assign(variable, value)

    with _values_go(target, give):
        yield


def _made(value: Stored, dtype: str) -> Any:
    return keras.ops.convert_to_tensor(value.array(), dtype=dtype)


@contextmanager
def _values_go(target: Target, to: Callable[[Any, Any], None]) -> Iterator[None]:
    """Inside, ``to(variable, value)`` is called for what Keras assigns to variables that have a target."""
    kind, store = keras.Variable, saving_lib.H5IOStore
    convert, get, open_file = kind._convert_to_tensor, store.__getitem__, store._get_h5_file
    files: dict[str, KeptFile] = {}

    def keep(self: Any, value: Any, dtype: Any = None) -> Any:
        return value if isinstance(value, Stored) else convert(self, value, dtype=dtype)

    def assign(self: Any, value: Any) -> None:
        variable = target(self)
        if variable is not None:
            to(variable, value)

    def opened(self: Any, path: Any, mode: Any = None) -> Any:
        file = self._weft_file = _kept_file(self, path, mode, files)
        if file is None or not self.archive:
            return open_file(self, path, mode)
        self.io_file = file.open()
        return h5py.File(self.io_file, "r")

    def stored(self: Any, key: str) -> Any:
        if self._weft_file is None:
            return get(self, key)
        return Stored(self._weft_file, saving_lib.safe_get_h5_dataset(self._h5_entry_group, key))

    with (
        _replaced(kind, _convert_to_tensor=keep, _direct_assign=assign),
        _replaced(store, _get_h5_file=opened, __getitem__=stored),
    ):
        _reading.append(True)
        try:
            yield
        finally:
            _reading.pop()
            for fault in (each for file in files.values() for each in file.faults):
                raise fault


@contextmanager
def _replaced(of: Any, **by: Any) -> Iterator[None]:
    """Inside, a class or a module has these attributes."""
    before = {name: getattr(of, name) for name in by}
    try:
        for name, each in by.items():
            setattr(of, name, each)
        yield
    finally:
        for name, each in before.items():
            setattr(of, name, each)


def _kept_file(store: Any, path: Any, mode: Any, files: dict[str, KeptFile]) -> KeptFile | None:
    """The file that a store of Keras is about to read; None if it cannot be read from its middle."""
    if (mode or store.mode) != "r" or isinstance(path, io.BytesIO):
        return None
    name, member = os.fspath(path), None
    if store.archive:
        member = store.archive.getinfo(name)
        name = store.archive.filename
        if member.compress_type != zipfile.ZIP_STORED or not isinstance(name, str):
            return None
    if name not in files:  # which has one member with weights
        files[name] = KeptFile(name, member)
    return files[name]


def load_when_made() -> None:
    """From now on variables that wait take the values of a file that Keras loads when they are made."""
    load, load_model = saving_lib.load_weights_only, saving_lib.load_model
    if hasattr(load, "_weft"):
        return

    @functools.wraps(load)
    def load_weights_only(*args: Any, **kwargs: Any) -> Any:
        if _reading or not waiting():
            return load(*args, **kwargs)
        with values_checked(_itself):
            load(*args, **kwargs)
        with values_taken(_itself):
            return load(*args, **kwargs)

    @functools.wraps(load_model)
    def load_whole_model(*args: Any, **kwargs: Any) -> Any:
        if _reading or not delays():
            return load_model(*args, **kwargs)
        with values_taken(_itself), _replaced(saving_lib, is_memory_sufficient=_from_archive):
            return load_model(*args, **kwargs)

    load_weights_only._weft = True  # type: ignore[attr-defined]
    saving_lib.load_weights_only, saving_lib.load_model = load_weights_only, load_whole_model


def _itself(variable: Any) -> Any:
    return variable


def _from_archive(model: Any) -> bool:
    """Fails, upon which Keras reads the archive as it is: neither into memory nor from a copy."""
    raise MemoryError
