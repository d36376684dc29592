"""The process beside a rank. It is started by its path and uses Python's own library only, so it is small.

    program.py RANK BEGAN LAUNCHER BEGAN        two processes and when they began; 0 0: there is no such launcher

Its standard input says the port of the job's store once that is known, and a full stop when all ranks have come to
their end: then there is nothing left to do.

A rank that still runs LOOKS after the last connection with another host has gone stands still: a thread of its own
would have noticed. It is killed. When the rank has ended before the full stop, the launcher is given as many looks to
end by itself. It is ended if in all that time it had no rank on this host any more, and sent words to another host that
nobody confirmed.

What is counted is looks and not seconds: time in which this process did not run counts for nobody. A process is held by
a descriptor of it: its number may be another one's later, the descriptor never is.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

LOOK_S = 2.0
LOOKS = 4
MOST_LOOKS = 60
"""A launcher that has not ended by then is none that waits for a lost host: a person decides."""
PATIENCE_S = 2.0
"""Open MPI takes a second request within 5 s for an order to end at once."""
_ESTABLISHED = "01"
_SENDS_AGAIN = "01"
_LOST = 3
"""So often has something been sent again that one packet which was lost is no explanation."""
_RANK = b"OMPI_COMM_WORLD_RANK="


def main() -> int:
    rank, rank_began, launcher, launcher_began = map(int, sys.argv[1:])
    with suppress(OSError):
        held = Process(launcher, launcher_began) if launcher else None
        all_came = False
        with suppress(ProcessLookupError):
            all_came = watch(Process(rank, rank_began))
        if held is not None and not all_came:
            clear(held)
    return 0


def watch(rank: Process) -> bool:
    """Returns when the rank has ended, or does not need this any more: whether all came to their end."""
    told, port, seen, missed = b"", 0, False, 0
    while True:
        ready = select.select([0, rank.descriptor], [], [], LOOK_S)[0]
        if 0 in ready:
            part = os.read(0, 100)
            if not part:
                return not rank.ends_within(LOOK_S)  # it has closed what it does not know
            told += part
            if b"." in told:
                return True
            port = int(told) if told.endswith(b"\n") else 0
        elif ready:
            return False
        elif port:
            there = someone_there(connections(rank.pid), port)
            seen, missed = seen or there, 0 if there else missed + seen
            if missed >= LOOKS:
                rank.send(signal.SIGKILL)


def clear(launcher: Process) -> None:
    """Ends a launcher that would wait for another host; returns when it is gone, or is none of those."""
    lost = 0
    for _ in range(MOST_LOOKS):
        if launcher.ends_within(LOOK_S):
            return
        waits = unheard(connections(launcher.pid), sockets(launcher.pid)) and not has_ranks(launcher.pid)
        lost = lost + 1 if waits else 0
        if lost >= LOOKS:
            break
    else:
        return
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        launcher.send(number)
        if launcher.ends_within(PATIENCE_S):
            return


class Process:
    """One process, as long as this object lives.

    Raises:
        OSError: It is gone, or the system has no such descriptors.
    """

    def __init__(self, pid: int, began: int) -> None:
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)
        if int(stat(pid)[19]) != began:
            raise ProcessLookupError(f"process {pid} is another one")

    def ends_within(self, seconds: float) -> bool:
        return bool(select.select([self.descriptor], [], [], seconds)[0])

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)


def stat(pid: int) -> list[bytes]:
    """What Linux tells of a process after its name: its state, its parent, ...; its beginning is number 19."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


class Connection(NamedTuple):
    """One line of Linux's table of TCP connections."""

    local: str
    remote: str
    state: str
    timer: str
    sent_again: int
    inode: str

    def has_port(self, port: int) -> bool:
        return port in (int(end.rpartition(":")[2], 16) for end in (self.local, self.remote))

    @property
    def to_other_host(self) -> bool:
        return self.local.rpartition(":")[0] != self.remote.rpartition(":")[0]


def connections(pid: int) -> list[Connection]:
    """Those of the network that a process sees, its own and others'."""
    found = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
            found += [parsed(line) for line in file.readlines()[1:]]
    return found


def parsed(line: str) -> Connection:
    """A line of the table, without what is not needed.

    >>> parsed("1: 01014D0A:9C4C 02014D0A:B2E6 01 0000004A:00000000 01:00000A2C 00000004 0 0 3921 2 0 0")
    Connection(local='01014D0A:9C4C', remote='02014D0A:B2E6', state='01', timer='01', sent_again=4, inode='3921')
    """
    words = line.split()
    local, remote, state, _, timer, sent_again = words[1:7]
    return Connection(local, remote, state, timer.partition(":")[0], int(sent_again, 16), words[9])


def someone_there(found: Iterable[Connection], port: int) -> bool:
    """Whether anybody on another host keeps a connection to the store at this port, or from it."""
    return any(each.state == _ESTABLISHED and each.to_other_host and each.has_port(port) for each in found)


def unheard(found: Iterable[Connection], inodes: set[str]) -> bool:
    """Whether what went out through one of these sockets is sent again and again, and nobody confirms it."""
    return any(
        each.inode in inodes and each.timer == _SENDS_AGAIN and each.sent_again >= _LOST for each in found
    )


def sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets; none where nobody may look."""
    found = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                kind, _, rest = os.readlink(f"/proc/{pid}/fd/{name}").partition(":[")
                if kind == "socket":
                    found.add(rest.rstrip("]"))
    return found


def has_ranks(launcher: int) -> bool:
    """Whether a process that this launcher has started as a rank still runs, or one of which nobody can say."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent = stat(int(name))[:2]
                if int(parent) != launcher or state in b"ZX":
                    continue
                with open(f"/proc/{name}/environ", "rb") as file:
                    if any(entry.startswith(_RANK) for entry in file.read().split(b"\0")):
                        return True
            except PermissionError:
                return True
            except OSError:
                continue
    return False


if __name__ == "__main__":
    sys.exit(main())
