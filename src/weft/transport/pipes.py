"""Pipes for the headers between two ranks of one host: whoever waits for one is woken by the system itself.

Each rank makes the pipe that it reads, and the other opens its writing end through /proc/PID/fd, which the system
allows for the same user only. A pipe ends when its writer does, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat

from weft.errors import TransportError

PIPE_BYTES = 256 << 10
"""Room for headers that have not been read; writers beyond it must wait."""


class Pipe:
    """Both directions between this rank and one peer."""

    def __init__(self) -> None:
        self._reading, self._lent = os.pipe2(os.O_CLOEXEC)
        self._writing = -1
        with contextlib.suppress(OSError):  # more than this user may have: 64 KiB do, too
            fcntl.fcntl(self._lent, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def number(self) -> int:
        """By which the peer finds the end that it writes."""
        return self._lent

    def connect(self, pid: int, number: int) -> None:
        """Open the writing end that process `pid` lends.

        Raises:
            TransportError: There is none.
        """
        try:
            found = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if not stat.S_ISFIFO(os.fstat(found).st_mode):
                os.close(found)
                raise OSError("it is no pipe")
            self._writing = found
        except OSError as error:
            raise TransportError(f"the pipe of process {pid} cannot be opened: {error}") from error

    @property
    def writes(self) -> bool:
        """True if the peer's end is open."""
        return self._writing >= 0

    def release_lent(self) -> None:
        """The peer has opened its end: from now on this pipe ends with that process."""
        if self._lent >= 0:
            os.close(self._lent)
            self._lent = -1

    def write(self, data: bytes | bytearray) -> bool:
        """Write all of `data` (at most 4096 bytes) and return True; False if there is no room. Never waits.

        Raises:
            OSError: The peer is gone.
        """
        try:
            os.write(self._writing, data)
        except BlockingIOError:
            return False
        return True

    def wait_for_room(self) -> None:
        """Return when :meth:`write` may succeed again, or the peer is gone."""
        poll = select.poll()
        poll.register(self._writing, select.POLLOUT)
        poll.poll()

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end, when the peer is gone."""
        data = os.read(self._reading, size)
        while data and len(data) < size:
            more = os.read(self._reading, size - len(data))
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in (self._reading, self._lent, self._writing):
            if descriptor >= 0:
                os.close(descriptor)
        self._reading = self._lent = self._writing = -1
