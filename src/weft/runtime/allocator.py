"""glibc's malloc, set up for a training step.

A step frees and takes the same large buffers again and again. By default glibc gives them back to the system,
and taking them again costs page faults: 7 % of a step. So freed memory is kept, up to ``KEPT_BYTES`` and
``KEPT_SHARE`` of what the rank may have. It is given back once, after the trace, which needs more than later steps.

What one thread takes and another frees stays for the other (malloc's cache of each thread), between large free pieces
that it keeps from becoming one. Where threads send gradients beside the step, the heap grew by one to two MiB a step
in this way, with no more of it in use. So free memory is also given back whenever the process holds much more than it
did (:class:`Growth`).

Microbatches are threads, of which one runs at a time. glibc would give each a heap of its own, where the others cannot
use what it has freed: so there is one heap for all that start from now on.

What the user has set in the environment (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_ARENA_MAX``)
stays. Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from weft.errors import FormatError
from weft.untrusted import read_text, whole

KEPT_BYTES = 1 << 30
KEPT_SHARE = 1 / 16
SCARCE_BYTES = 1 << 20
"""Where memory is scarce, buffers from so many bytes on are mapped, and unmapped when they are freed."""
EVERY = 8
"""Steps from one look at the memory to the next."""
LEAST_GROWTH_BYTES = 64 << 20
GROWTH = 1 / 8
"""Of what the process held: from so much more on (and `LEAST_GROWTH_BYTES`) free memory is given back."""

_LIMIT = Path("/sys/fs/cgroup/memory.max")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_memory(environ: Mapping[str, str], ranks: int = 1, scarce: bool = False) -> bool:
    """Set malloc up for this process, of ``ranks`` on its host; whether there was a glibc that took all of it.

    ``scarce``: memory counts for more than time. Large buffers go back to the system at once.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    kept = SCARCE_BYTES if scarce else min(KEPT_BYTES, int(host_bytes(ranks) * KEPT_SHARE))
    options = (
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, SCARCE_BYTES if scarce else KEPT_BYTES),
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, kept),
        ("MALLOC_ARENA_MAX", _M_ARENA_MAX, 1),
    )
    # what weft's launcher has set is not the user's wish
    own = (None, str(KEPT_BYTES)) if scarce else (None,)
    wanted = [(option, value) for name, option, value in options if environ.get(name) in own]
    return all([mallopt(option, value) == 1 for option, value in wanted])


def give_back() -> None:
    """Return free memory to the system: after something that needed more than the steps that follow will."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass


def host_bytes(ranks: int) -> int:
    """The share of a rank in the memory of its host, or of its control group; `ranks`: how many share it."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(FormatError):  # there is no group
        limit = whole(read_text(_LIMIT).strip())  # or no limit: "max"
        host = host if limit is None else min(host, limit)
    return host // max(1, ranks)


def resident_bytes() -> int:
    """Memory that the process has from the system; 0 where it does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def peak_bytes() -> int:
    """The most memory that the process had from the system since the last call; 0 where the system does not say.

    Linux counts anew from here on: the peak that other tools read (`VmHWM`) is then that since this call.
    """
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, ValueError):
        found = None
    return int(found[1]) << 10 if found else resident_bytes()


def is_mapped(address: int) -> bool:
    """True if the memory there is a file's, read when it is needed; False where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        first, last = (int(each, 16) for each in span.split("-"))
        if first <= address < last:
            return inode != "0"
    return False


class Growth:
    """Gives free memory back when the process holds much more than some steps before; :meth:`look` before each step."""

    def __init__(self) -> None:
        self._steps = 0
        self._usual_bytes = 0

    def look(self) -> None:
        """Counts a step; now and then gives memory back to the system if more is held than usual."""
        self._steps += 1
        if self._steps % EVERY:
            return
        held = resident_bytes()
        if not self._usual_bytes:
            self._usual_bytes = held
        elif held > self._usual_bytes + max(GROWTH * self._usual_bytes, LEAST_GROWTH_BYTES):
            give_back()
            self._usual_bytes = 0
