"""Ranks on other hosts, as the launcher sees them: one ssh to an agent on each host.

connect   every agent says where it is; one that does not, in time, is reported as lost
start     when all are there: the first host holds a port, then all start their ranks
watch     what agents say arrives in the launcher's loop; a host that is silent or whose ssh ends is lost
bring     recordings that are not in the launcher's folder come from their hosts
close     agents are asked to end, or notice that nobody is there
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import weft
from weft.errors import LaunchError
from weft.launch.environ import LOOPBACK
from weft.launch.output import Lines
from weft.launch.remote.mirror import SLOWLY_S, Mirror
from weft.launch.remote.recordings import Arriving, files_of, lacking
from weft.launch.remote.wire import PING_S, Incoming, Outgoing
from weft.launch.running.job import Host, Job
from weft.launch.running.local_ranks import Take
from weft.terminal_text import visible
from weft.units import format_bytes, format_seconds
from weft.untrusted import shown_text
from weft.watch.failure import Failure
from weft.watch.heartbeat import Page
from weft.watch.judge import Verdict
from weft.watch.process import die_with_parent

CONNECT_S = 120.0
"""How long an agent may take until it says its first word."""
LEAST_SILENT_S = 10.0
"""A host is never given up earlier: agents wait for the machine, too."""
CLOSE_S = 5.0
BRING_S = 60.0
"""Recordings of which nothing comes for so long are given up."""
_MOST_OF = 0.8
_WORDS = 2000
"""So much is kept of what ssh says of itself."""


class _Link:
    """The ssh to one host, and what is known of that host."""

    def __init__(self, host: Host, number: int, ranks: range, page: Page) -> None:
        self.name, self.number, self.ranks = host.name, number, ranks
        self.mirror = Mirror(page, "launcher", set(range(page.ranks)) - {*ranks}, every_s=SLOWLY_S)
        self.incoming = Incoming(marked=True)
        self.hello: Mapping[str, Any] = {}
        self.pids: dict[int, int] = {}
        self.stopped: set[int] = set()
        self.alive = {*ranks}
        self.gone = ""
        self.arriving: Arriving | None = None
        self.words = b""
        self.began = self.heard = self.said = self.arrived = time.monotonic()
        launcher = os.getpid()

        def in_child() -> None:
            os.setpgid(0, 0)  # Ctrl-C is for the launcher
            die_with_parent(launcher)

        try:
            self.process = subprocess.Popen(
                host.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                preexec_fn=in_child,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(
                f"{host.command[0]} cannot be started: {error.strerror}: install an ssh client"
            ) from error
        assert self.process.stdin is not None
        self.out = Outgoing(self.process.stdin.fileno())

    def say(self, values: dict[str, Any], data: bytes = b"") -> None:
        self.said = time.monotonic()
        with suppress(BrokenPipeError):  # its end is noticed where it is read
            self.out.say(values, data)

    @property
    def who(self) -> str:
        """The host and its ranks."""
        return f"{visible(self.name)} ({_named(self.ranks)})"

    def last_words(self) -> str:
        """The last lines that ssh said of itself, as one line."""
        lines = (line.strip() for line in self.words.decode(errors="replace").splitlines())
        return "; ".join([visible(line) for line in lines if line][-3:])


def _named(ranks: range) -> str:
    """
    >>> _named(range(4, 8)), _named(range(3, 4))
    ('ranks 4 to 7', 'rank 3')
    """
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


class Elsewhere:
    """See the module. It is what :class:`weft.launch.running.local_ranks.Here` is for one machine.

    Attributes:
        lost: That a host cannot be reached, or not any more, once that is so.
        gone: The names of such hosts.
        ready: All ranks were started.

    Args:
        own: Variables of all ranks that come after everything else.
        say: Is given lines that are no rank's.
    """

    def __init__(
        self,
        job: Job,
        page: Page,
        own: Mapping[str, str],
        selector: selectors.BaseSelector,
        take: Take,
        say: Callable[[bytes], None],
    ) -> None:
        self.lost: Verdict | None = None
        self.ready = False
        self._job, self._page, self._own, self._selector = job, page, own, selector
        self._take, self._say = take, say
        self._asked = self._closing = False
        self._silent_s = max(job.limits.heartbeat, LEAST_SILENT_S)
        self._ended: list[tuple[int, int]] = []
        self._recording = Path(job.recording) if job.recording else None
        self._before = files_of(self._recording, range(job.ranks)) if self._recording else {}
        count = job.ranks // len(job.hosts)
        self._links: list[_Link] = []
        for number, host in enumerate(job.hosts):
            link = _Link(host, number, range(number * count, (number + 1) * count), page)
            self._links.append(link)
            self._register(link)

    @property
    def gone(self) -> list[str]:
        return [link.name for link in self._links if link.gone]

    def _register(self, link: _Link) -> None:
        out, err = link.process.stdout, link.process.stderr
        assert out is not None and err is not None
        lines = Lines(self._say, b"[%s] " % visible(link.name).encode())

        def hear() -> None:
            data = os.read(out.fileno(), 1 << 16)
            if data:
                link.heard = time.monotonic()
                self._hear(link, data)
            else:
                self._selector.unregister(out)
                self._lose(link)

        def hear_ssh() -> None:
            data = os.read(err.fileno(), 1 << 16)
            if not data:
                self._selector.unregister(err)
            link.words = (link.words + data)[-_WORDS:]
            if link.hello and not self._closing:
                lines.feed(data)

        self._selector.register(out, selectors.EVENT_READ, hear)
        self._selector.register(err, selectors.EVENT_READ, hear_ssh)

    def _hear(self, link: _Link, data: bytes) -> None:
        try:
            for values, more in link.incoming.feed(data):
                self._heed(link, values, more)
        except (LaunchError, KeyError, TypeError, ValueError) as error:
            self._lose(link, f"{error}")

    def _heed(self, link: _Link, values: dict[str, Any], data: bytes) -> None:
        kind = values.get("kind")
        if kind == "hello":
            self._greet(link, values)
        elif kind == "port":
            for each in self._links:
                each.say(self._start_message(each, values["variables"]))
        elif kind == "started":
            link.pids = {int(rank): int(pid) for rank, pid in values["pids"].items()}
            self.ready = all(each.pids for each in self._links)
        elif kind == "output" and values["rank"] in link.ranks:
            self._take(values["rank"], bool(values["error"]), data)
        elif kind == "end" and values["rank"] in link.alive:
            link.alive.discard(values["rank"])
            self._ended.append((values["rank"], int(values["code"])))
        elif kind == "stopped":
            link.stopped = {*values["ranks"]}
        elif kind == "error":
            self._lose(link, visible(str(values.get("text"))))
        elif kind in ("file", "piece", "unread", "brought"):
            self._receive(link, values, data)
        elif kind == "report" and values.get("rank") in link.ranks:
            link.mirror.apply((values, self._on_this_clock(link, data)))
        elif kind == "job" or values.get("rank") in link.ranks:
            link.mirror.apply((values, data))

    def _greet(self, link: _Link, values: Mapping[str, Any]) -> None:
        link.hello = {**values, "offset": time.monotonic() - float(values["time"])}
        self._page.hosts |= dict.fromkeys(link.ranks, self.host(link.ranks[0]))
        noise = visible(link.incoming.noise.decode(errors="replace"), "\n").strip()
        for line in noise.splitlines():
            self._say(f"[{visible(link.name)}] {line}\n".encode())
        if values.get("weft") != weft.__version__:
            theirs = shown_text(str(values.get("weft")))
            self._lose(
                link, f"it has weft {theirs} and this host {weft.__version__}: install the same on both"
            )

    def _on_this_clock(self, link: _Link, report: bytes) -> bytes:
        """A report of a failure, with its time as this host has it: reports of several hosts are put in order."""
        failure = Failure.from_json(report.decode())
        values = {**failure.__dict__, "time": failure.time + link.hello["offset"]}
        return Failure(**values).to_json(self._page.report_limit).encode()

    def _start_message(self, link: _Link, port: Mapping[str, str]) -> dict[str, Any]:
        return {
            "kind": "start", "command": [*self._job.command], "variables": dict(self._job.environ),
            "own": {**port, **self._own}, "ranks": self._job.ranks, "hosts": len(self._links), "host": link.number,
            "silent_s": self._silent_s, "recording": self._job.recording,
        }  # fmt: skip

    def exchange(self, listening: bool = True) -> None:
        """Says what is to be said, and notices who is silent; the launcher calls this in each of its turns.

        ``listening``: it has looked for messages; one that waits for the reader of its output does not.
        """
        now = time.monotonic()
        if not self._asked and all(link.hello for link in self._links) and self.lost is None:
            self._asked = True
            try:
                self._links[0].say({"kind": "port", "address": self._address()})
            except LaunchError as error:
                self._lose(self._links[0], str(error))
        for link in self._links:
            if link.gone:
                continue
            if not listening:
                link.heard = now
            limit = self._silent_s if link.hello else CONNECT_S
            if now - link.heard > limit and not self._closing:
                self._lose(link, f"it has said nothing for {format_seconds(limit)}")
                continue
            if link.pids:
                for values, data in link.mirror.changes():
                    link.say(values, data)
            if now - link.said > PING_S:
                link.say({"kind": "ping"})
            with suppress(BrokenPipeError):
                link.out.push()

    def bring(self) -> None:
        """Ask the hosts whose recordings are not in this machine's folder for them, as far as they are there."""
        for link in self._links if self._recording is not None else ():
            assert self._recording is not None
            if link.pids and not link.gone and lacking(self._recording, link.ranks, self._before):
                link.arriving = Arriving(self._recording, link.ranks)
                link.arrived = time.monotonic()
                link.say({"kind": "fetch"})

    @property
    def brings(self) -> bool:
        """True if recordings are still to come."""
        for link in self._links:
            if link.arriving is not None and time.monotonic() - link.arrived > BRING_S:
                self._stop_bringing(link, f"nothing came for {format_seconds(BRING_S)}")
        return any(link.arriving is not None and not link.gone for link in self._links)

    def _receive(self, link: _Link, values: Mapping[str, Any], data: bytes) -> None:
        if link.arriving is None:
            return  # it was given up
        link.arrived = time.monotonic()
        try:
            link.arriving.take(values, data)
        except LaunchError as error:
            self._stop_bringing(link, str(error))
            return
        if link.arriving.over:
            found = f"{link.arriving.files} files, {format_bytes(link.arriving.size)}"
            if link.arriving.files:
                self._say(f"weft: recordings of {link.who} have come: {found}\n".encode())
            link.arriving = None

    def _stop_bringing(self, link: _Link, why: str) -> None:
        assert link.arriving is not None
        link.arriving.close()
        link.arriving = None
        self._say(f"weft: recordings of {link.who} did not come: {visible(why)}\n".encode(errors="replace"))

    def instead(self, verdict: Verdict) -> Verdict:
        """The verdict on ranks that show nothing: that their host is silent, if that is so."""
        link = self._of(verdict.ranks[0])
        silent_s = time.monotonic() - link.heard
        if verdict.kind == "frozen" and not link.gone and silent_s > _MOST_OF * self._job.limits.heartbeat:
            self._lose(link, f"it has said nothing for {format_seconds(silent_s)}")
        return self.lost or verdict

    def _address(self) -> str:
        """Where the other hosts reach the first one: where ssh has reached it.

        Raises:
            LaunchError: That is its loopback, and others are elsewhere.
        """
        if len(self._links) == 1:
            return LOOPBACK
        found = [str(link.hello.get("address") or link.name.rpartition("@")[2]) for link in self._links]
        local = [address.startswith("127.") or address == "::1" for address in found]
        if local[0] and not all(local):
            raise LaunchError(
                f"ssh reached it at {shown_text(found[0])}, where other hosts cannot: name it by an address on the "
                "hosts' network, or begin with another host"
            )
        return found[0]

    def _lose(self, link: _Link, why: str = "") -> None:
        """Nothing more is heard of a host."""
        if self._closing or link.gone:
            return
        with suppress(subprocess.TimeoutExpired):
            link.process.wait(0.2)
        err = link.process.stderr
        if err is not None and link.process.returncode is not None:
            os.set_blocking(err.fileno(), False)
            with suppress(BlockingIOError):
                link.words = (link.words + (err.read() or b""))[-_WORDS:]
        code = link.process.returncode
        said = (
            why
            or link.last_words()
            or (f"ssh ended with exit code {code}" if code is not None else "ssh is silent")
        )
        how = (
            "is gone"
            if link.pids
            else "did not start its ranks"
            if link.hello
            else "cannot be reached by ssh"
        )
        link.gone = f"{link.who} {how}: {said}"
        self._ended += [(rank, -signal.SIGKILL) for rank in sorted(link.alive)]
        link.alive.clear()
        if self.lost is None:
            self.lost = Verdict("lost", tuple(link.ranks), link.gone)

    def ends(self) -> list[tuple[int, int]]:
        """Ranks that ended since the last call, with their exit codes; a signal's is negative."""
        found, self._ended = self._ended, []
        return found

    def _of(self, rank: int) -> _Link:
        return self._links[rank // (self._job.ranks // len(self._links))]

    def pid(self, rank: int) -> int:
        """The process of a rank on its host; 0 before it is known."""
        return self._of(rank).pids.get(rank, 0)

    def host(self, rank: int) -> str:
        """The name of the host of a rank, as it calls itself."""
        link = self._of(rank)
        return visible(str(link.hello.get("host") or link.name))

    def is_stopped(self, rank: int) -> bool:
        """True if its process stands still because of a signal or a debugger."""
        return rank in self._of(rank).stopped

    def send(self, rank: int, number: int, alone: bool = False) -> None:
        """A signal to a rank's whole process group, or ``alone`` to itself."""
        link = self._of(rank)
        if rank in link.alive and not link.pids:  # it has not started yet, and will not
            link.alive.discard(rank)
            self._ended.append((rank, -number))
        elif rank in link.alive:
            link.say({"kind": "signal", "ranks": [rank], "number": int(number), "alone": alone})

    def close(self) -> None:
        """Ends what is left; returns when the agents are gone, or do not answer."""
        self._closing = True
        for link in self._links:
            if link.arriving is not None:
                link.arriving.close()
            link.say({"kind": "end"})
        deadline = time.monotonic() + CLOSE_S
        for link in self._links:
            pipes = [pipe for pipe in (link.process.stdin, link.process.stdout, link.process.stderr) if pipe]
            if link.process.stdin is not None:
                with suppress(OSError):
                    link.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                link.process.wait(0 if link.gone else max(0.0, deadline - time.monotonic()))
            link.process.kill()
            link.process.wait()
            for pipe in pipes:
                with suppress(OSError):
                    pipe.close()
        del self._take, self._say
