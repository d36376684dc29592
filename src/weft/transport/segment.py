"""Memory that one rank owns and the other ranks of its host map: how CPU processes send and reduce without a network.

The memory belongs to an anonymous file (``memfd_create``): it has no name in any folder, so nothing is left behind
however its processes end, and no limit on /dev/shm holds. Others reach it through the owner's /proc/PID/fd, which
the system opens for the same user only. The owner holds a POSIX record lock on it until it ends, however it ends;
whoever gets that lock knows that the owner is gone.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import platform
import secrets

import torch

from weft.errors import TransportError

HEADER_BYTES = 4096
NONCE_BYTES = 16
LINE = 8
"""Words of 8 bytes between two counters: each has a cache line of its own."""
_NONCE_AT = HEADER_BYTES - NONCE_BYTES


def available() -> bool:
    """True if this system can share memory in this way.

    A counter says that data written before it is there: so stores have to be seen in order, as on x86.
    """
    return hasattr(os, "memfd_create") and platform.machine() == "x86_64"


def host_number() -> int:
    """A number for this process's host: alike where processes may share memory.

    Processes share a host if they have the same boot of the same kernel, the same user and the same numbering of
    processes (two containers on one machine are two hosts).
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            name = f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    except OSError:
        name = os.uname().nodename
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


class Segment:
    """A header of counters, and ``size`` bytes of data.

    ``counters`` are signed words of 8 bytes, written by the owner only; a word is written and read whole.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, HEADER_BYTES + size)
        self.size = size
        self.counters = memoryview(self._map)[:_NONCE_AT].cast("q")

    @classmethod
    def create(cls, size: int) -> tuple[Segment, tuple[int, int, int, int]]:
        """A segment of this rank's own, and the address (four words) by which others find it."""
        descriptor = os.memfd_create("weft", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, HEADER_BYTES + size)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        segment = cls(descriptor, size)
        nonce = secrets.token_bytes(NONCE_BYTES)
        segment._map[_NONCE_AT:HEADER_BYTES] = nonce
        words = (int.from_bytes(nonce[at : at + 8], "little", signed=True) for at in (0, 8))
        return segment, (os.getpid(), descriptor, *words)  # type: ignore[return-value]

    @classmethod
    def open(cls, address: tuple[int, int, int, int], size: int) -> Segment:
        """The segment of another rank.

        Raises:
            TransportError: There is none at that address: the ranks do not share a host, a user or /proc.
        """
        pid, number, *words = address
        nonce = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_size != HEADER_BYTES + size:
                    raise OSError("it has another size")
                segment = cls(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
            if segment._map[_NONCE_AT:HEADER_BYTES] != nonce:
                segment.close()
                raise OSError("it is another process's")
            return segment
        except OSError as error:
            raise TransportError(
                f"the memory of process {pid} cannot be mapped by process {os.getpid()} ({error}): ranks that share "
                'memory need one host, one user and one /proc; choose the algorithm "direct" or give which ranks '
                "share a host"
            ) from error

    def view(self, dtype: torch.dtype, at: int, size: int) -> torch.Tensor:
        """``size`` bytes of data from byte ``at`` on, as a flat tensor."""
        count = size // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=HEADER_BYTES + at)

    def owner_lives(self) -> bool:
        """True if the process that made the segment still runs; not to be asked by that process."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Unmap it as soon as no tensor views it; the last process that does so frees the memory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.counters.release()
