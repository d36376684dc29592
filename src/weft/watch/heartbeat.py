"""The signs of life of a rank while it runs, in memory that whoever watches it can read.

A rank that was killed cannot say what it did, and one whose interpreter is locked cannot answer. So each
rank keeps its last sign in a page of memory: one slot a rank, written in place. Under `weft run` the page
is an anonymous file that the launcher shares with its ranks: it needs no lock, no answer and no clean-up.

    header                    magic  ranks  ending | course: see there | leader: length, JSON
    slot, once for a rank     life: state pid beat heartbeat stall | work: notes step microbatch evaluations
                              peer phase module | measures: idle memory | loop: step | file: seconds
                              operation | report: length, JSON
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from weft.errors import LaunchError
from weft.terminal_text import visible
from weft.watch.job_header import Course
from weft.watch.process import host_name

WAITING = frozenset({"wait", "receive", "send", "collective", "barrier"})
"""The phases in which a rank does nothing but wait for another one."""

_CALL = re.compile(r"(.*\(\)|the optimizer's step)(?: of .*| over .*)?$")
"""The name of a collective that is a call of the script's, and the group of it."""
_MAGIC = 0x5745465450414745
_HEADER = struct.Struct("<3q")
_LIFE = struct.Struct("<3q2d")
_BEAT = struct.Struct("<q")
_WORK = struct.Struct("<5q24s104s")
_LENGTH = struct.Struct("<q")
_MEASURES = struct.Struct("<dq")
_FILE = struct.Struct("<d216s")
_BEAT_AT = 16
_WORK_AT = 64
_MEASURES_AT = 256
_LOOP_AT = 272
_FILE_AT = 280
_LEADER_AT = 64
_REPORT_AT = 512
_SLOTS_AT = 4096
_SLOT = 32768


class State(IntEnum):
    """The state of a rank."""

    ABSENT = 0
    RUNNING = 1
    FINISHING = 2
    FINISHED = 3


@dataclass(frozen=True)
class Sign:
    """One rank as last seen.

    Attributes:
        step: The number of its last step, those for evaluation included.
        evaluations: How many of them had no backward pass.
        evaluates: The last one is one of these.
        idle: The share of its last step in which it had nothing to run.
        memory_bytes: What it had then; 0 if nobody measured it.
        operation: That on a file in which it stands (``reads /data/part-3``); empty if in none.
        operation_s: For how many seconds that has been seen.
    """

    state: State = State.ABSENT
    pid: int = 0
    beat: int = 0
    heartbeat: float = 0.0
    stall: float = 0.0
    notes: int = 0
    step: int | None = None
    microbatch: int | None = None
    peer: int | None = None
    evaluations: int = 0
    evaluates: bool = False
    phase: str = ""
    module: str = ""
    host: str = ""
    idle: float = 0.0
    memory_bytes: int = 0
    operation: str = ""
    operation_s: float = 0.0

    @property
    def waiting(self) -> bool:
        return self.state is State.RUNNING and self.phase in WAITING

    @property
    def call(self) -> str:
        """The script's call, of all ranks, in which this one is; empty if it is in none.

        >>> [Sign(phase="collective", module=name).call for name in ("barrier() of WORLD", "send() to rank 1")]
        ['barrier()', '']
        """
        if self.phase not in ("collective", "barrier"):
            return ""
        found = _CALL.match(self.module)
        return found[1] if found else ""

    def who(self, rank: int) -> str:
        """The rank with its host and process.

        >>> Sign(pid=42, host="node7").who(1)
        'rank 1 on node7 (pid 42)'
        """
        return f"rank {rank}" + (f" on {self.host} (pid {self.pid})" if self.host else "")

    def where(self) -> str:
        """The rank's place in its work, in words; empty if it never said.

        >>> Sign(step=3, microbatch=1, phase="forward", module="layers.0").where()
        'step 3, microbatch 1, forward of layers.0'
        """
        parts = [self.which_step()] if self.step is not None else []
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        if self.phase:
            parts.append(f"{self.phase} of {self.module}" if self.module else self.phase)
        elif self.module:
            parts.append(self.module)
        if self.operation:
            parts.append(self.operation)
        return ", ".join(parts)

    def which_step(self) -> str:
        """The step as people count: those that train, and apart from them those that only evaluate.

        >>> Sign(step=5, evaluations=2).which_step(), Sign(step=5, evaluations=2, evaluates=True).which_step()
        ('step 3', 'evaluation step 2 after step 3')
        """
        trained = f"step {(self.step or 0) - self.evaluations}"
        return f"evaluation step {self.evaluations} after {trained}" if self.evaluates else trained

    def last_seen(self) -> str:
        """`where`, to be added to a sentence."""
        where = self.where()
        return f"; last seen in {where}" if where else ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sign:
        return cls(**{**values, "state": State(values["state"])})


class _Names(dict[str | None, bytes]):
    """Texts as the bytes of a field; what is too long keeps its end."""

    def __init__(self, width: int) -> None:
        super().__init__({None: b""})
        self._width = width

    def __missing__(self, text: str) -> bytes:
        encoded = text.encode(errors="replace")
        if len(encoded) > self._width:
            encoded = b".." + encoded[2 - self._width :]
        self[text] = encoded
        return encoded


class Page:
    """The signs of all ranks of a host."""

    def __init__(self, memory: mmap.mmap, ranks: int) -> None:
        self._memory = memory
        self._host = host_name()
        self.hosts: dict[int, str] = {}
        """Hosts of ranks that are not on this one."""
        self.ranks = ranks
        self.course = Course(memory)

    @classmethod
    def create(cls, ranks: int) -> tuple[Page, int]:
        """A page, and the file descriptor to share it by."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("weft")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        size = _SLOTS_AT + ranks * _SLOT
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        _HEADER.pack_into(memory, 0, _MAGIC, ranks, 0)
        return cls(memory, ranks), descriptor

    @classmethod
    def attach(cls, descriptor: int) -> Page:
        """The page behind a file descriptor that this process inherited."""
        try:
            memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            magic, ranks, _ = _HEADER.unpack_from(memory, 0)
        except (OSError, ValueError, struct.error):
            magic = ranks = 0
        if magic != _MAGIC:
            raise LaunchError(
                f"the file descriptor {descriptor} is not the one that `weft run` shares with its ranks: "
                "a process started by a rank must not use weft, or must not inherit WEFT_SHARED_FD"
            )
        return cls(memory, ranks)

    @classmethod
    def private(cls, ranks: int) -> Page:
        """A page that is seen by this process only."""
        memory = mmap.mmap(-1, _SLOTS_AT + ranks * _SLOT)
        _HEADER.pack_into(memory, 0, _MAGIC, ranks, 0)
        return cls(memory, ranks)

    @property
    def ending(self) -> bool:
        """The job is being ended: nobody has to wait for anybody any more."""
        return bool(_HEADER.unpack_from(self._memory, 0)[2])

    def end(self) -> None:
        _HEADER.pack_into(self._memory, 0, _MAGIC, self.ranks, 1)

    @property
    def leader(self) -> str:
        """Where rank 0 listens, as it wrote it; empty before."""
        return self._text(_LEADER_AT, _SLOTS_AT)

    @leader.setter
    def leader(self, text: str) -> None:
        self._write(_LEADER_AT, _SLOTS_AT, text)

    def slot(self, rank: int) -> Slot:
        return Slot(self._memory, _SLOTS_AT + rank * _SLOT)

    def sign(self, rank: int) -> Sign:
        """The sign of a rank; read until it did not change meanwhile."""
        seen = self.head(rank)
        state, pid, beat, heartbeat, stall = _LIFE.unpack_from(seen, 0)
        notes, *numbers, phase, module = _WORK.unpack_from(seen, _WORK_AT)
        texts = [visible(field.rstrip(b"\0").decode(errors="replace")) for field in (phase, module)]
        places = [None if number < 0 else number for number in numbers] if notes else [None, None, 0, None]
        operation_s, operation = _FILE.unpack_from(seen, _FILE_AT)
        operation = visible(operation.rstrip(b"\0").decode(errors="replace"))
        if state == State.ABSENT:
            return Sign(operation=operation, operation_s=operation_s)
        life = (State(state & 3), pid, beat, heartbeat, stall)
        step, microbatch, counted, peer = places
        evaluations, evaluates = divmod(counted or 0, 2)
        idle, memory_bytes = _MEASURES.unpack_from(seen, _MEASURES_AT)
        return Sign(
            *life, notes, step, microbatch, peer, evaluations, bool(evaluates), texts[0], texts[1],
            self.hosts.get(rank, self._host), idle, memory_bytes, operation, operation_s,
        )  # fmt: skip

    def signs(self) -> dict[int, Sign]:
        return {rank: self.sign(rank) for rank in range(self.ranks)}

    def head(self, rank: int) -> bytes:
        """All of a rank's slot but its report, for a page on another host; read until it did not change meanwhile."""
        at = _SLOTS_AT + rank * _SLOT
        for _ in range(8):
            seen = self._memory[at : at + _REPORT_AT]
            if seen == self._memory[at : at + _REPORT_AT]:
                break
        return seen

    def put_head(self, rank: int, head: bytes) -> None:
        """Sets the rank's head to what `head` gave on its own host."""
        if len(head) != _REPORT_AT:
            raise ValueError(f"a slot's head has {_REPORT_AT} bytes, and {len(head)} came")
        at = _SLOTS_AT + rank * _SLOT
        self._memory[at : at + _REPORT_AT] = head

    def loop_step(self, rank: int) -> int:
        """The step of the script's loop that a rank is in, counted over restarts; 0 where nobody counts so."""
        (step,) = _LENGTH.unpack_from(self._memory, _SLOTS_AT + rank * _SLOT + _LOOP_AT)
        return int(step)

    def report(self, rank: int) -> str:
        """The report that a rank left behind as it failed; empty if there is none."""
        at = _SLOTS_AT + rank * _SLOT
        return self._text(at + _REPORT_AT, at + _SLOT)

    def write_report(self, rank: int, text: str) -> None:
        at = _SLOTS_AT + rank * _SLOT
        self._write(at + _REPORT_AT, at + _SLOT, text)

    @property
    def report_limit(self) -> int:
        """The most bytes that a report may have."""
        return _SLOT - _REPORT_AT - _LENGTH.size

    def _text(self, start: int, end: int) -> str:
        (length,) = _LENGTH.unpack_from(self._memory, start)
        start += _LENGTH.size
        return self._memory[start : start + max(0, min(length, end - start))].decode(errors="replace")

    def _write(self, start: int, end: int, text: str) -> None:
        """The text first, its length last: a reader sees all of it or nothing."""
        encoded = text.encode(errors="replace")
        at = start + _LENGTH.size
        if len(encoded) > end - at:
            raise ValueError(f"{len(encoded)} bytes do not fit into {end - at}")
        self._memory[at : at + len(encoded)] = encoded
        _LENGTH.pack_into(self._memory, start, len(encoded))


class Slot:
    """A rank's own part of a page."""

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        self._memory = memory
        self._at = at
        self._work_at = at + _WORK_AT
        self._notes = 0
        self._beat = 0
        self._step = -1
        self._evaluations = 0
        self._phases = _Names(24)
        self._modules = _Names(104)

    def open(self, heartbeat: float, stall: float) -> None:
        """From now on the rank counts as running; the two limits are seconds."""
        _LIFE.pack_into(self._memory, self._at, State.RUNNING, os.getpid(), 0, heartbeat, stall)

    def set_state(self, state: State) -> None:
        _BEAT.pack_into(self._memory, self._at, state)

    def beat(self) -> None:
        self._beat += 1
        _BEAT.pack_into(self._memory, self._at + _BEAT_AT, self._beat)

    def count_evaluations(self, count: int, now: bool) -> None:
        """From the next note on: how many steps so far were for evaluation, and whether this one is."""
        self._evaluations = 2 * count + now

    def measure(self, idle: float, memory_bytes: int) -> None:
        """Notes the measures of the rank's last step; see :class:`Sign`."""
        _MEASURES.pack_into(self._memory, self._at + _MEASURES_AT, idle, memory_bytes)

    def reach(self, step: int) -> None:
        """The script's loop is in this step, counted over restarts."""
        _LENGTH.pack_into(self._memory, self._at + _LOOP_AT, step)

    def stand(self, operation: str, seconds: float) -> None:
        """The rank stands in this operation on a file for so long by now; in none if that is empty."""
        encoded = operation.encode(errors="replace")
        if len(encoded) > 216:
            encoded = encoded[:60] + b".." + encoded[-154:]
        _FILE.pack_into(self._memory, self._at + _FILE_AT, seconds, encoded)

    def note(
        self,
        phase: str,
        step: int | None = None,
        microbatch: int | None = None,
        module: str | None = None,
        peer: int | None = None,
    ) -> None:
        """Notes the work that the rank turns to now. `step` stays as it was where it is None."""
        self._notes += 1
        if step is not None:
            self._step = step
        _WORK.pack_into(
            self._memory,
            self._work_at,
            self._notes,
            self._step,
            -1 if microbatch is None else microbatch,
            self._evaluations,
            -1 if peer is None else peer,
            self._phases[phase],
            self._modules[module],
        )
