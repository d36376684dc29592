"""The output of many ranks on one terminal: whole lines, never mixed, and a progress line that works.

Lines of a rank appear when they are complete. Rank 0 may also show a line that is not (a prompt, or a
progress line that goes back with a carriage return): when another rank has something to say meanwhile,
that line is closed first.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
from collections.abc import Callable

LINE_LIMIT = 1 << 16
"""A line that grows longer than this is shown piece by piece."""
KEPT_LIMIT = 1 << 20
"""With more bytes than this that its reader has not taken, a sink is full."""
WHOLE = 1 << 20
_ERASE = b"\x1b[K"
"""What a terminal shows from the cursor to the end of the line goes."""


class Sink:
    """Where output goes; several ranks share it. Whoever writes is never held up.

    What the reader does not take is kept here. Once that is much, the sink is `full`, and nobody should read more from
    the ranks. A sink that cannot be written to (a full disk) keeps the reason as `error` and forgets all else.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.error = ""
        self._kept = bytearray()
        self._open_by: object = None
        self._returned = False
        self._terminal = os.isatty(descriptor)
        found = os.fstat(descriptor)
        self.identity = (found.st_dev, found.st_ino)
        """The file or terminal behind it: two sinks of the same one must be one."""
        self._part = WHOLE if stat.S_ISREG(found.st_mode) else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, writer: object, data: bytes) -> None:
        """Shows data of a writer; another writer's unfinished line is closed before.

        One that ended with a carriage return, a line of progress, goes instead.

        Raises:
            BrokenPipeError: Nobody reads any more.
        """
        if self._returned and self._terminal:
            self._kept += _ERASE
        elif self._open_by is not None and self._open_by is not writer:
            self._kept += b"\n"
        self._kept += data
        self._returned = data.endswith(b"\r")
        self._open_by = None if data.endswith(b"\n") else writer
        self.push()

    @property
    def waiting(self) -> bool:
        """The reader has not taken everything yet."""
        return bool(self._kept)

    @property
    def full(self) -> bool:
        return len(self._kept) > KEPT_LIMIT

    def push(self) -> None:
        """Hands on as much as is taken now: a pipe that is ready takes `PIPE_BUF` bytes without delay."""
        while self._kept and self._poll.poll(0):
            try:
                written = os.write(self.descriptor, self._kept[: self._part])
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._kept.clear()
                raise
            except OSError as error:
                self.error = error.strerror or str(error)
                written = len(self._kept)
            del self._kept[:written]


class Streams:
    """The launcher's standard output and standard error, by their descriptors; one sink if they are one file."""

    def __init__(self, out: int, err: int) -> None:
        self.err = Sink(err)
        found = Sink(out)
        self.out = self.err if found.identity == self.err.identity else found
        self.lost = False
        """Something could not be written."""

    @property
    def full(self) -> bool:
        """Nobody takes the output: ranks have to wait when they write more."""
        return self.out.full or self.err.full

    @property
    def waiting(self) -> bool:
        return self.out.waiting or self.err.waiting

    def push(self) -> None:
        """Hands on what is taken now; says once that something cannot be written."""
        for sink in (self.out, self.err):
            sink.push()
        for sink, name, other in ((self.out, "output", self.err), (self.err, "error", self.out)):
            if sink.error and not self.lost:
                self.lost = True
                text = f"weft: the standard {name} cannot be written to: {sink.error}. What is written there is lost"
                other.write(self, f"{text}\n".encode())

    def wait(self, seconds: float, wakeup: socket.socket) -> None:
        """Until something is taken, or something arrives at `wakeup`, or for so many seconds."""
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        for sink in (self.out, self.err):
            if sink.waiting:
                poll.register(sink.descriptor, select.POLLOUT)
        poll.poll(1000 * seconds)
        with contextlib.suppress(BlockingIOError):
            wakeup.recv(4096)
        self.push()


class Lines:
    """Turns the bytes of one rank into lines of a sink.

    Args:
        emit: Takes what is ready to be shown.
        prefix: Stands before each line.
        live: Show unfinished lines too, and pass carriage returns on.
    """

    def __init__(self, emit: Callable[[bytes], None], prefix: bytes = b"", live: bool = False) -> None:
        self._emit = emit
        self._prefix = prefix
        self._live = live
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come, in any portions."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show(line + b"\n")
        if self._live and b"\r" in self._rest:
            self.flush()
        elif len(self._rest) > LINE_LIMIT:
            self._show(self._rest + b"\n")
            self._rest = b""

    def flush(self) -> None:
        """Shows an unfinished line, if this rank may."""
        if self._live and self._rest:
            self._emit(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Shows what is left."""
        if self._rest:
            self._show(self._rest if self._live else self._rest + b"\n")
            self._rest = b""

    def _show(self, line: bytes) -> None:
        if not self._live:
            shown = line.rstrip(b"\r\n").rpartition(b"\r")[2]
            line = self._prefix + shown + b"\n"
        self._emit(line)
