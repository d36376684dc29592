"""Memory in huge pages (2 MiB on x86), where Linux can: the processor has fewer pages to look up.

A training step goes through all of its memory again and again, weights, gradients and activations. In pages of 4 KiB
that is more than the processor's table of pages holds. Each piece of 2 MiB that is in use anyway, nearly in full, is
made one page (``madvise(MADV_COLLAPSE)``, Linux 6.1), so the process takes no more memory than before. What a step has
freed is kept for the next one (``weft.runtime.allocator``), so it stays joined. Joining takes time itself, on some
machines 30 ms a piece, so it gets a small share of the training's.

Where the system forbids huge pages (``never`` in ``/sys/kernel/mm/transparent_hugepage/enabled``), on an older kernel
and elsewhere than on Linux nothing is done.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
MAPPINGS = Path("/proc/self/maps")
USED = 0.9
"""The share of a piece that must be in use, so that filling it up costs little."""
SHARE = 0.02
"""Of the time between looks that a look may take: about what a step gains by its memory's being joined."""
LEAST_S, LIMIT_S = 0.05, 0.25
"""Shorter and longer looks are not worth it. The next one goes on where a look stopped."""
_MADV_COLLAPSE = 25


class HugePages:
    """:meth:`look` is called before each step."""

    def __init__(self) -> None:
        self.page = huge_page()
        self._since: float | None = None
        self._reached = 0

    def look(self) -> None:
        """Join what has come into use, as long as the time since the last look allows. The first one has none."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        time_s = SHARE * (now - self._since)
        if self.page and time_s >= LEAST_S:
            self._reached = join(self.page, self._reached, now + min(time_s, LIMIT_S))
            self._since = time.monotonic()


def huge_page() -> int:
    """Bytes of a huge page; 0 where there is none to be had."""
    try:
        if "[never]" in (SYSTEM / "enabled").read_text():
            return 0
        return int((SYSTEM / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def join(page: int, start: int, deadline_s: float) -> int:
    """Make pieces from address ``start`` on a page each; the address reached at the deadline, 0 when all are done."""
    libc = ctypes.CDLL(None)
    for piece in used_pieces(page, start):
        if time.monotonic() > deadline_s:
            return piece
        libc.madvise(ctypes.c_void_p(piece), ctypes.c_size_t(page), _MADV_COLLAPSE)
    return 0


def used_pieces(page: int, start: int) -> Iterator[int]:
    """Addresses of pieces from ``start`` on that lie in this process's own memory and are in use."""
    libc = ctypes.CDLL(None)
    each = page // mmap.PAGESIZE
    for begin, end in own_memory(MAPPINGS.read_text()):
        first = -(-max(begin, start) // page) * page
        count = (end - first) // page
        if count <= 0:
            continue
        held = ctypes.create_string_buffer(count * each)
        if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * page), held) != 0:
            continue  # unmapped in the meantime
        used = held.raw
        for number in range(count):
            if used.count(1, number * each, (number + 1) * each) >= USED * each:
                yield first + number * page


def own_memory(mappings: str) -> list[tuple[int, int]]:
    """Ranges of addresses, in order, of what the process has allocated for itself (no files, nothing shared)."""
    found: list[tuple[int, int]] = []
    for line in mappings.splitlines():
        fields = line.split(None, 5)
        if fields[1] != "rw-p" or fields[4] != "0" or (len(fields) > 5 and fields[5] != "[heap]"):
            continue
        begin, end = (int(address, 16) for address in fields[0].split("-"))
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found
