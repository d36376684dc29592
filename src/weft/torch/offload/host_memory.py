"""Memory for what a rank's device does not hold: pinned host memory for a GPU, mapped files for a CPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import defaultdict
from typing import cast

import torch
from torch import Tensor, UntypedStorage

from weft.errors import UsageError
from weft.units import format_bytes


class HostMemory:
    """Storages outside of a device. A storage that is given back is used again.

    ``device``: the one that is relieved.
    """

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self._free: defaultdict[int, list[UntypedStorage]] = defaultdict(list)
        self._used: set[int] = set()

    def take(self, nbytes: int) -> UntypedStorage:
        """A storage of so many bytes, with any content.

        Raises:
            UsageError: The disk has no room for it.
        """
        self._used.add(nbytes)
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        if self.pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
        return _mapped_file(nbytes)

    def give(self, storage: UntypedStorage) -> None:
        """Nobody needs the content of the storage any more."""
        self._free[storage.nbytes()].append(storage)

    def forget_unused(self) -> None:
        """Free what nobody has taken since the last call: batches of other shapes leave sizes behind."""
        for nbytes in self._free.keys() - self._used:
            del self._free[nbytes]
        self._used.clear()

    def page_out(self, storage: UntypedStorage) -> None:
        """The storage is not needed for a while: it leaves the process's memory, its content stays."""
        self._advise(storage, mmap.MADV_DONTNEED)

    def page_in(self, storage: UntypedStorage) -> None:
        """The storage is needed soon: the system begins to read it."""
        self._advise(storage, mmap.MADV_WILLNEED)

    def _advise(self, storage: UntypedStorage, advice: int) -> None:
        if not self.pinned:
            address, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
            ctypes.CDLL(None).madvise(address, size, advice)


def _mapped_file(nbytes: int) -> UntypedStorage:
    """A storage that is a file without a name: it ends with the process."""
    folder = tempfile.gettempdir()
    try:
        with tempfile.NamedTemporaryFile(prefix="weft-offload-") as file:
            if hasattr(os, "posix_fallocate"):  # or writing would end the process where the disk is full
                os.posix_fallocate(file.fileno(), 0, nbytes)
            return cast(UntypedStorage, UntypedStorage.from_file(file.name, True, nbytes))
    except OSError as error:
        raise UsageError(
            f"offloading needs {format_bytes(nbytes)} more in the folder {folder} ({error.strerror}): free some, or "
            "set TMPDIR to a folder on a disk with room"
        ) from None


def tensor_in(storage: UntypedStorage, like: Tensor) -> Tensor:
    """A tensor of the same type, shape and order of dimensions, in a storage of its own, with any content."""
    strides = torch.empty_like(like, device="meta").stride()
    return torch.empty(0, dtype=like.dtype, device=storage.device).set_(storage, 0, like.shape, strides)
