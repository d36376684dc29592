"""Types that files of PyTorch may hold besides tensors, so that they are read without running code.

Scripts keep their arguments and random states in checkpoints. ``torch.load`` reads plain data only, since version 2.6
also where a script does not say so. To that belong here what is nothing but data: ``argparse.Namespace``, paths, and
NumPy's arrays and numbers. All else is refused as ever.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import importlib
import pathlib
from contextlib import suppress
from typing import Any

import torch

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
"""Where arrays come from, by the version of NumPy that wrote them."""
_KINDS = "?bBhHiIlLqQefdFD"


def allow() -> None:
    """Let ``torch.load(..., weights_only=True)`` read such data, in the whole process."""
    known: list[Any] = [
        argparse.Namespace, pathlib.PosixPath, pathlib.PurePosixPath, collections.deque,
        (codecs.encode, "_codecs.encode"),
    ]  # fmt: skip
    with suppress(ImportError):
        import numpy as np

        known += [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in _KINDS}]
        parts = importlib.import_module(
            _NUMPY[1] if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else _NUMPY[0]
        )
        for name in ("_reconstruct", "scalar"):
            known += [(getattr(parts, name), f"{module}.{name}") for module in _NUMPY]
    torch.serialization.add_safe_globals(known)
