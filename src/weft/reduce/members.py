"""Replicas of one host that come and go: who belongs to the average now, in memory that outlives each of them.

The launcher makes the memory, says by *generations* which replicas belong together, and is the only one to do so. Ranks
write how far they are into slots of their own. All of these numbers only grow, and the words of a rank that was killed
can still be read. So every rank sees alike whether a step was complete, and nobody has to be asked.

    generation    which replicas belong together; a new one when a replica was lost, or wants to join
    slot          of one rank: its generation, and the phases of the step that it has come to
    text          what the first replica to split the model decided, for all others

A phase is a number made of generation and step: a step that is averaged again has a greater one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum

_RING = 64
_SLOT_WORDS = 16
_HEAD_WORDS = 8
REPLICAS, POSITIONS, GENERATION = range(3)


class Word(IntEnum):
    """The words of a rank's slot.

    READY: the start of its process that waits to join. JOINED: the start that has the replicas' state. AT: the
    generation that it has come to. WEIGHT: whether its samples count. SHAPES: a number that stands for what is
    averaged. ALIKE: one for rates and scales. POSTED, SUMMED, ARRIVED, GIVEN, TAKEN, MISSED: the last phase in which
    it has shown its gradients, has summed its part, has the average, has shown its state, has taken another one's,
    could not take it. SIZE: the bytes of that state. ASKED: the phase in which it was first asked to end; 0: never.
    SAVER: the replica that saves.
    """

    READY = 0
    JOINED = 1
    AT = 2
    WEIGHT = 3
    SHAPES = 4
    POSTED = 5
    SUMMED = 6
    ARRIVED = 7
    GIVEN = 8
    TAKEN = 9
    MISSED = 10
    SIZE = 11
    ASKED = 12
    ALIKE = 13
    SAVER = 14


def available() -> bool:
    """True if this system can share memory in this way: stores have to be seen in order, as on x86."""
    return hasattr(os, "memfd_create") and platform.machine() == "x86_64"


class Table:
    """The memory itself: words of 8 bytes, each written by one process only.

    Args:
        memory: A file descriptor of the words.
        files: A file descriptor for each rank's data, by replica and position, and one for the text at the end.
    """

    def __init__(self, memory: int, files: Sequence[int]) -> None:
        self._memory, self.files = memory, files
        self._map = mmap.mmap(memory, 0)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, replicas: int, positions: int) -> Table:
        """The launcher's: for so many replicas of so many ranks."""
        words = _HEAD_WORDS + _RING * replicas + replicas * positions * _SLOT_WORDS
        memory = os.memfd_create("weft-replicas", os.MFD_CLOEXEC)
        os.ftruncate(memory, words * 8)
        files = [os.memfd_create("weft-replica", os.MFD_CLOEXEC) for _ in range(replicas * positions + 1)]
        table = cls(memory, files)
        table._words[REPLICAS], table._words[POSITIONS] = replicas, positions
        return table

    def address(self, replica: int, start: int) -> str:
        """The value of ``WEFT_REPLICA``, by which a rank of a replica finds the memory.

        ``start``: how often the replica was started before.
        """
        return ":".join(map(str, (os.getpid(), self._memory, replica, start, *self.files)))

    @classmethod
    def open(cls, address: str) -> tuple[Table, int, int]:
        """A rank's: the memory, the replica, and how often that was started before."""
        pid, memory, replica, start, *files = (int(part) for part in address.split(":"))
        opened = [os.open(f"/proc/{pid}/fd/{each}", os.O_RDWR | os.O_CLOEXEC) for each in (memory, *files)]
        return cls(opened[0], opened[1:]), replica, start

    @property
    def replicas(self) -> int:
        return self._words[REPLICAS]

    @property
    def positions(self) -> int:
        """The number of ranks of a replica."""
        return self._words[POSITIONS]

    @property
    def generation(self) -> int:
        """The present one; 0 before the first."""
        return self._words[GENERATION]

    def members(self) -> tuple[int, dict[int, int], set[int]]:
        """The present generation, its replicas with the numbers of their starts (from 1 on), and those that have come
        to the end of their script."""
        while True:
            generation = self._words[GENERATION]
            at = _HEAD_WORDS + generation % _RING * self.replicas
            row = list(self._words[at : at + self.replicas])
            if generation == self._words[GENERATION]:
                members = {replica: start for replica, start in enumerate(row) if start > 0}
                return generation, members, {replica for replica, start in enumerate(row) if start < 0}

    def begin(self, members: Mapping[int, int], ended: Container[int] = ()) -> int:
        """The launcher begins a generation of these replicas, each with the number of its start; its number.

        ``ended``: those that have come to the end of their script.
        """
        generation = self._words[GENERATION] + 1
        at = _HEAD_WORDS + generation % _RING * self.replicas
        for replica in range(self.replicas):
            self._words[at + replica] = -1 if replica in ended else members.get(replica, 0)
        self._words[GENERATION] = generation
        return generation

    def _at(self, replica: int, position: int, word: Word) -> int:
        slot = replica * self.positions + position
        return _HEAD_WORDS + _RING * self.replicas + slot * _SLOT_WORDS + word

    def get(self, replica: int, position: int, word: Word) -> int:
        return self._words[self._at(replica, position, word)]

    def put(self, replica: int, position: int, word: Word, value: int) -> None:
        self._words[self._at(replica, position, word)] = value

    def all_have(self, replica: int, word: Word, value: int) -> bool:
        """True if all ranks of a replica have this value."""
        return all(self.get(replica, position, word) == value for position in range(self.positions))

    def level(self, replica: int) -> int:
        """The phase or generation that all ranks of a replica have come to."""
        return min(
            max(self.get(replica, position, Word.AT) << 32, self.get(replica, position, Word.POSTED))
            for position in range(self.positions)
        )

    def file(self, replica: int, position: int) -> int:
        """The file descriptor of a rank's data."""
        return self.files[replica * self.positions + position]

    def share_text(self, make: Callable[[], str]) -> str:
        """The text that the first process to ask for it has made; all others get the same.

        If that one is killed meanwhile, the next one makes it.
        """
        with self._locked():
            content = os.pread(self.files[-1], os.fstat(self.files[-1]).st_size, 0).decode()
            if not content:
                content = make()
                os.pwrite(self.files[-1], content.encode(), 0)
            return content

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self.files[-1], fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.files[-1], fcntl.LOCK_UN)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        for file in (self._memory, *self.files):
            os.close(file)
