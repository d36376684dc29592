"""The agent on a host: starts the ranks there, forwards their output and state to the launcher, and ends them with it.

hello    what this host is called, and the address by which ssh reached it
start    the launcher says what to run; nothing of it stands in a command line
watch    output, signs and ends go to the launcher, signals and signs of others come from there
fetch    recordings of these ranks go to the launcher, which does not have them in its folder
end      the launcher is gone, says so, or has not been heard of for a while: all ranks end

It is started by its path, as ranks are: a folder called `weft` beside the script is nothing to it.
"""

from __future__ import annotations

import os
import platform
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import weft
from weft.errors import WeftError
from weft.launch.environ import free_port, rank_environ
from weft.launch.output import KEPT_LIMIT
from weft.launch.remote import recordings
from weft.launch.remote.mirror import Mirror
from weft.launch.remote.wire import MARK, PING_S, SILENT_S, Incoming, Message, Outgoing
from weft.launch.running.job import usable_cores
from weft.launch.running.local_ranks import Here
from weft.watch.files.operation import Outside
from weft.watch.heartbeat import Page
from weft.watch.process import host_name

DRAIN_S = 1.0
FILE = os.path.abspath(__file__)


def main() -> int:
    """Serves the launcher at the other end of the standard streams until one of the two is gone."""
    talking = os.dup(1)
    os.dup2(2, 1)  # whatever is printed by mistake is not a message
    os.write(talking, MARK)
    out = Outgoing(talking)
    address = ([*os.environ.get("SSH_CONNECTION", "").split()] + [""] * 4)[2]
    hello = {"host": host_name(), "address": address, "time": time.monotonic()}
    out.say({"kind": "hello", **hello, "weft": weft.__version__, "python": platform.python_version()})
    try:
        return _Agent(out).run()
    except WeftError as error:
        out.say({"kind": "error", "text": str(error)})
        os.set_blocking(talking, True)
        out.push()
        return 1
    except BrokenPipeError:  # the launcher is gone
        return 1


class _Agent:
    def __init__(self, out: Outgoing) -> None:
        self.out = out
        self.incoming = Incoming()
        self.heard = time.monotonic()
        self.said = time.monotonic()
        self.silent_s = SILENT_S
        self.over = False
        self.here: Here | None = None
        self.mirror: Mirror | None = None
        self.outside: Outside | None = None
        self.ranks = range(0)
        self.stopped: list[int] = []
        self.held: socket.socket | None = None
        self.folder: Path | None = None
        self.before: dict[str, int] = {}
        self.sending: Iterator[Message] = iter(())
        self.pipes = selectors.DefaultSelector()
        self.selector = selectors.DefaultSelector()
        os.set_blocking(0, False)
        self.selector.register(0, selectors.EVENT_READ)

    def run(self) -> int:
        try:
            while not self.over and time.monotonic() - self.heard < self.silent_s:
                self._turn()
                if time.monotonic() - self.said > PING_S:
                    self._say({"kind": "ping"})
            return 0
        finally:
            if self.here is not None:
                self.here.close()
            if self.held is not None:
                self.held.close()

    def _turn(self) -> None:
        waiting = len(self.out.kept)  # the launcher's reader stalls: then ranks wait when they print
        self._watch(self.pipes, self.here is not None and waiting <= KEPT_LIMIT)
        self._watch(self.out.descriptor, bool(self.out.kept), selectors.EVENT_WRITE)
        for key, _ in self.selector.select(0.05):
            if key.fileobj == 0:
                self._listen()
            elif key.fileobj is self.pipes:
                self._read()
        self.out.push()
        while len(self.out.kept) <= KEPT_LIMIT and (message := next(self.sending, None)):
            self._say(*message)
        if self.here is not None and self.mirror is not None and waiting <= 2 * KEPT_LIMIT:
            self._report(self.here, self.mirror)

    def _read(self) -> bool:
        """Forwards the ranks' output; True if there was any."""
        ready = self.pipes.select(0)
        for pipe, _ in ready:
            pipe.data()
        return bool(ready)

    def _watch(self, file: Any, wanted: bool, events: int = selectors.EVENT_READ) -> None:
        watched = file in self.selector.get_map()
        if wanted and not watched:
            self.selector.register(file, events)
        elif watched and not wanted:
            self.selector.unregister(file)

    def _say(self, values: dict[str, Any], data: bytes = b"") -> None:
        self.out.say(values, data)
        self.said = time.monotonic()

    def _report(self, here: Here, mirror: Mirror) -> None:
        """Sends what the ranks show, and who has ended: that comes after all that it wrote and showed."""
        if self.outside is not None:
            here.look_at_files(self.outside)
        for values, data in mirror.changes():
            self._say(values, data)
        stopped = [rank for rank in self.ranks if here.is_stopped(rank)]
        if stopped != self.stopped:
            self.stopped = stopped
            self._say({"kind": "stopped", "ranks": stopped})
        ended = here.ends()
        deadline = time.monotonic() + DRAIN_S
        while ended and time.monotonic() < deadline and self._read():
            pass
        for values, data in mirror.changes(at_once=True) if ended else ():
            self._say(values, data)
        for rank, code in ended:
            self._say({"kind": "end", "rank": rank, "code": code})

    def _listen(self) -> None:
        data = os.read(0, 1 << 16)
        self.over = self.over or not data
        self.heard = time.monotonic()
        for values, more in self.incoming.feed(data):
            kind = values.get("kind")
            if kind == "port":
                # One of the first host, for scripts that make their process group themselves.
                self.held, found = free_port(values["address"])
                self._say({"kind": "port", "variables": found})
            elif kind == "start" and self.here is None:
                self._start(values)
            elif kind == "signal" and self.here is not None:
                for rank in values["ranks"]:
                    self.here.send(rank, values["number"], values["alone"])
            elif kind == "fetch" and self.folder is not None:
                self.sending = recordings.messages(self.folder, self.ranks, self.before)
            elif kind == "end":
                self.over = True
            elif self.mirror is not None:
                self.mirror.apply((values, more))

    def _start(self, job: dict[str, Any]) -> None:
        self.silent_s = job["silent_s"]
        ranks, hosts, number = job["ranks"], job["hosts"], job["host"]
        count = ranks // hosts
        self.ranks = range(number * count, (number + 1) * count)
        if job["recording"]:
            self.folder = Path(job["recording"])
            self.before = recordings.files_of(self.folder, self.ranks)
        page, shared = Page.create(ranks)
        self.outside = Outside(page)
        self.mirror = Mirror(page, "agent", self.ranks, leads=number == 0)
        self.here = Here(job["command"], shared, self.pipes, self._take)
        base = {**os.environ, **job["variables"]}
        for rank in self.ranks:
            own = rank_environ(base, rank, ranks, usable_cores(), hosts)
            self.here.start(rank, {**own, **job["own"]})
        self._say({"kind": "started", "pids": {str(rank): self.here.pid(rank) for rank in self.ranks}})

    def _take(self, rank: int, is_error: bool, data: bytes) -> None:
        self._say({"kind": "output", "rank": rank, "error": is_error}, data)


if __name__ == "__main__":
    sys.exit(main())
