"""The memory in which matrix products pack their operands.

MKL multiplies matrices in PyTorch's builds for Intel and AMD processors. It keeps such memory for each thread.
Microbatches are threads of which one runs at a time. Each would have megabytes of its own, and would find them in no
cache when its turn comes. A thread that gives its memory back with the turn leaves it to the next thread, still in
the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_NAMES = ("mkl_thread_free_buffers", "mkl_serv_thread_free_buffers")
"""What gives back the memory of the calling thread: as MKL documents it, and as it is called inside PyTorch's own
builds."""


def find_release() -> Callable[[], None]:
    """A function that gives back what the calling thread keeps; one that does nothing where there is no MKL."""
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError:
        return lambda: None
    for name in _NAMES:
        if hasattr(library, name):
            release: Callable[[], None] = getattr(library, name)
            release.argtypes, release.restype = (), None  # type: ignore[attr-defined]
            return release
    return lambda: None
