"""The process beside a rank. It is started by its path and uses Python's own library only, so it is small.

    program.py RANK BEGAN PORT HEARTBEAT LAUNCHER BEGAN

RANK and LAUNCHER are processes, each with when it began; 0 stands for no such launcher. PORT is that of the job's
store, HEARTBEAT the `heartbeat_timeout` in seconds. The standard input has two words: ALL_CAME, all ranks have come to
their end, so there is nothing left to do; LEAVING, the first rank has left as it should. Others may follow, and the
rank may work on alone for as long as it likes: its connections are no sign of life any more.

Before that: all connections with other hosts have gone, but the rank still runs: it has `heartbeat_timeout` to notice,
and LOOKS to end, as it would by itself. One that does not stands still, and is killed.

The rank has ended without that word: the launcher has LOOKS to end by itself. It is ended if in all that time it had
no rank on this host any more, and sent words to another host that nobody confirmed.

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
ALL_CAME, LEAVING = b".", b"l"
_ESTABLISHED = "01"
_TRIED = 3
"""So often has something been sent again that one packet which was lost is no explanation."""
_RANK = b"OMPI_COMM_WORLD_RANK="


def main() -> int:
    rank, rank_began, port, heartbeat, launcher, launcher_began = map(int, sys.argv[1:])
    with suppress(OSError):
        held = Process(launcher, launcher_began) if launcher else None
        all_came = False
        with suppress(ProcessLookupError):
            all_came = watch(Process(rank, rank_began), port, LOOKS + int(heartbeat / LOOK_S))
        if held is not None and not all_came:
            clear(held)
    return 0


def watch(rank: Process, port: int, looks: int) -> bool:
    """Returns when the rank has ended, or does not need this any more: whether all came to their end."""
    seen, missed = False, 0
    while True:
        ready = select.select([0, rank.descriptor], [], [], LOOK_S)[0]
        if 0 in ready:  # a rank that has closed what it does not know is left alone
            word = os.read(0, 1)
            if word != LEAVING:
                return bool(word) or not rank.ends_within(LOOK_S)
            looks = sys.maxsize
        if rank.descriptor in ready:
            return False
        there = someone_there(connections(), port)
        seen, missed = seen or there, 0 if there else missed + seen
        if missed >= looks:
            rank.send(signal.SIGKILL)


def clear(launcher: Process) -> None:
    """Ends a launcher that would wait for another host; returns when it is gone, or is none of those."""
    lost = 0
    for _ in range(MOST_LOOKS):
        if launcher.ends_within(LOOK_S):
            return
        waits = unheard(connections(), sockets(launcher.pid))
        waits = waits and not any(is_rank(pid) for pid, _ in children(launcher.pid))
        lost = lost + 1 if waits else 0
        if lost >= LOOKS:
            end(launcher)
            return


def end(launcher: Process) -> None:
    """First it is asked to; what it has to reach other hosts, such as ssh, goes after it."""
    ways = []
    for child in children(launcher.pid):
        with suppress(OSError):
            ways.append(Process(*child))
    for number in (signal.SIGTERM, signal.SIGKILL):
        launcher.send(number)
        if launcher.ends_within(PATIENCE_S):
            break
    for way in ways:
        way.send(signal.SIGTERM)


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
    """The fields of a process in Linux's ``stat`` after its name: its state, its parent, ...; its beginning is
    number 19."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


class Connection(NamedTuple):
    """One line of Linux's table of TCP connections.

    Attributes:
        waiting: How many bytes the other end has not confirmed.
        tried: How often they were sent again, or it was asked for room for them, without an answer since.
    """

    local: str
    remote: str
    state: str
    waiting: int
    tried: int
    inode: str

    def has_port(self, port: int) -> bool:
        return port in (int(end.rpartition(":")[2], 16) for end in (self.local, self.remote))

    @property
    def to_other_host(self) -> bool:
        return self.local.rpartition(":")[0] != self.remote.rpartition(":")[0]


def connections() -> list[Connection]:
    """All of this host, as far as this process sees its network."""
    found = []
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if os.path.exists(path):
            with open(path, encoding="ascii") as file:
                found += [parsed(line) for line in file.readlines()[1:]]
    return found


def parsed(line: str) -> Connection:
    """A line of the table, without what is not needed.

    >>> parsed("1: 01014D0A:9C4C 02014D0A:B2E6 01 0000004A:00000000 01:00000A2C 00000004 0 0 3921 2 0 0")
    Connection(local='01014D0A:9C4C', remote='02014D0A:B2E6', state='01', waiting=74, tried=4, inode='3921')
    """
    _, local, remote, state, queues, _, again, _, asked, inode = line.split()[:10]
    waiting = int(queues.partition(":")[0], 16)
    return Connection(local, remote, state, waiting, int(again, 16) + int(asked), inode)


def someone_there(found: Iterable[Connection], port: int) -> bool:
    """True if anybody on another host keeps a connection to the store at this port, or from it."""
    return any(each.state == _ESTABLISHED and each.to_other_host and each.has_port(port) for each in found)


def unheard(found: Iterable[Connection], inodes: set[str]) -> bool:
    """True if what was written to one of these sockets is sent again and again, and nobody confirms it."""
    return any(each.inode in inodes and each.waiting and each.tried >= _TRIED for each in found)


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


def children(launcher: int) -> list[tuple[int, int]]:
    """The processes that this one has started and that still run, each with when it began."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                state, parent, *rest = stat(int(name))
                if int(parent) == launcher and state not in b"ZX":
                    found.append((int(name), int(rest[17])))
    return found


def is_rank(pid: int) -> bool:
    """True if Open MPI has started this process as a rank; True where nobody may look."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(_RANK) for entry in file.read().split(b"\0"))
    except PermissionError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
