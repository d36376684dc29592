"""glibc's malloc, set up for a training step.

A step frees and takes the same large buffers again and again. By default glibc gives them back to the system,
and taking them again costs page faults: 7 % of a step. So freed memory is kept, up to ``KEPT_BYTES``, and given
back once, after the trace, which needs more than the steps that follow.

Microbatches are threads, of which one runs at a time. glibc would give each a heap of its own, where the others cannot
use what it has freed: so there is one heap for all that start from now on.

What the user has set in the environment (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_ARENA_MAX``)
stays. Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

KEPT_BYTES = 1 << 30

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = (
    ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, KEPT_BYTES),
    ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, KEPT_BYTES),
    ("MALLOC_ARENA_MAX", _M_ARENA_MAX, 1),
)


def keep_memory(environ: Mapping[str, str]) -> bool:
    """Set malloc up for this process; whether there was a glibc that took all of it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = [(option, value) for name, option, value in _SETTINGS if name not in environ]
    return all([mallopt(option, value) == 1 for option, value in wanted])


def give_back() -> None:
    """Return free memory to the system: after something that needed more than the steps that follow will."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
