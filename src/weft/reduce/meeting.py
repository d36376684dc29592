"""The end of a step over the replicas that are there: an average in shared memory that a lost replica cannot hold up.

    form      all ranks of a new generation have come to it
    post      each rank shows its gradients; they stay there until the step is complete
    sum       each rank sums its part of them, over the replicas whose samples count, in the replicas' order
    arrive    each rank copies the parts; once *all ranks of all replicas* have them the step is complete

If the generation changes before that, the replicas that are left form the new one and average again what is still
posted. Whether all have arrived can be read in memory that outlives the ranks, and stays true once it is. So a step is
complete on all ranks or on none: a rank that is about to average again looks first whether the step was complete
after all.

A replica that joins posts zeros which do not count. When the step is complete the first of the others shows its state
to it. Whoever has no state yet when that replica is lost tries again in the next generation.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from weft.errors import DivergenceError, UsageError
from weft.reduce.members import Table, Word

log = logging.getLogger("weft")

_ALIGNED = 64
_NAPS_S = 0.00005, 0.002
_NOTE_S = 1.0
_NUMBER = (1 << 32) - 1
"""The bits of a phase that number the step."""


class _Changed(Exception):
    """There is another generation."""


@dataclass(frozen=True)
class Outcome:
    """A complete step.

    Attributes:
        phase: Its number, made of generation and step.
        members: The replicas that took part, with the numbers of their starts.
        counted: Those whose samples count.
        asked: Whether a rank was asked to end the job.
        saver: The replica that saves: the same one until it is lost.
    """

    phase: int
    members: dict[int, int]
    counted: tuple[int, ...]
    asked: bool = False
    saver: int = 0


@dataclass
class Payload:
    """The tensors of a meeting, on the CPU.

    Attributes:
        averaged: These get the average over the replicas that count.
        first: These get what the first of those has.
        alike: A text that is the same on all replicas that count.
    """

    averaged: Sequence[Tensor] = ()
    first: Sequence[Tensor] = ()
    alike: str = ""
    _posted: bool = field(default=False, init=False)

    def digest(self) -> int:
        """A number that stands for dtypes and shapes."""
        return _number([[str(t.dtype), list(t.shape)] for t in (*self.averaged, *self.first)])


class Meeting:
    """This rank among the replicas.

    Args:
        table: Says who is there.
        replica: The rank's.
        start: How often that was started before.
        position: The rank's place in its replica.
        wait: Called about once a second while this rank waits for another replica.

    Attributes:
        steps: How many steps are complete.
        holds: Whether this rank has the replicas' state.
        generation: That in which it has met the others last; 0 before.
    """

    def __init__(
        self, table: Table, replica: int, start: int, position: int, wait: Callable[[], object] = lambda: None
    ) -> None:
        self._table, self.replica, self._start, self._position = table, replica, start + 1, position
        self._wait_hook = wait
        self.steps, self.holds, self.generation = 0, False, 0
        self._members: dict[int, int] = {}
        self._saver = 0
        self._maps: dict[int, mmap.mmap] = {}

    @property
    def joins(self) -> bool:
        """True if the others have begun without this replica."""
        return not self.holds and self._table.generation > 0

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Give all replicas what the first one has, before the first step; all of them wait for each other."""
        self._put(Word.READY, self._start)
        self._complete(Payload(first=tensors), number=1, counts=True)
        self._put(Word.JOINED, self._start)
        self.holds = True

    def average(self, payload: Payload, asked: bool) -> Outcome:
        """Average over the replicas that are there; on a rank that joins nothing counts, and it has no state yet."""
        self._put(Word.READY, self._start)
        outcome = self._complete(payload, self.steps + 2, self.holds, asked)
        self.steps = (outcome.phase & _NUMBER) - 1
        return outcome

    # --- one step ---------------------------------------------------------------------------------------------

    def _complete(self, payload: Payload, number: int, counts: bool, asked: bool = False) -> Outcome:
        outcome: Outcome | None = None
        results: list[Tensor] = []
        while True:
            try:
                if self._table.generation != (self.generation or None) and self._form(outcome):
                    break
                outcome = None
                outcome, results = self._exchange(payload, number, counts, asked)
                self._put(Word.ARRIVED, outcome.phase)
                self._wait(partial(self._is_complete, outcome))
                break
            except _Changed:
                continue
        assert outcome is not None
        for target, value in zip((*payload.averaged, *payload.first), results, strict=True):
            target.copy_(value)
        phases = [self._table.get(*rank, Word.ASKED) for rank in self._ranks(outcome.members)]
        self._saver = outcome.saver
        return replace(outcome, asked=any(0 < each <= outcome.phase for each in phases))

    def _is_complete(self, outcome: Outcome | None) -> bool:
        """True if all ranks have the average of this phase. A replica that came back later has no say in it."""
        if outcome is None:
            return False
        generation, number = outcome.phase >> 32, outcome.phase & _NUMBER
        arrived = (self._table.get(*rank, Word.ARRIVED) for rank in self._ranks(outcome.members))
        return all(
            each & _NUMBER > number or (each >> 32, each & _NUMBER) == (generation, number)
            for each in arrived
        )

    def _form(self, outcome: Outcome | None) -> bool:
        """Come to the newest generation with all its ranks; True if the former one was complete after all."""
        naps = self._naps()
        while True:
            generation, members, ended = self._table.members()
            if self._members.keys() & ended and not self._is_complete(outcome):
                raise DivergenceError(
                    f"replica {_listed(sorted(ended))} has come to the end of its script, and this one is in another "
                    "step: give all replicas the same number of steps"
                )
            if members.get(self.replica) == self._start:
                self._put(Word.AT, generation)
                ranks = self._ranks(members)
                # in this order: whoever is in a later step has come here after this one was complete
                here = all(self._table.get(*rank, Word.AT) >= generation for rank in ranks)
                if self._is_complete(outcome):
                    self._put(Word.AT, self.generation)
                    return True
                if here:
                    self.generation, self._members = generation, members
                    return False
            next(naps)

    def _exchange(
        self, payload: Payload, number: int, counts: bool, asked: bool
    ) -> tuple[Outcome, list[Tensor]]:
        """One average in the present generation, as far as this rank has it."""
        peers, here = sorted(self._members), self._position
        phase = self.generation << 32 | number if counts else self._phase_of_others()
        if asked and not self._get(Word.ASKED):
            self._put(Word.ASKED, phase)
        layout = _Layout(payload)
        if not payload._posted:
            layout.put(payload, self._memory(self.replica, layout.size))
            payload._posted = True
        self._put(Word.WEIGHT, int(counts))
        self._put(Word.SHAPES, payload.digest())
        self._put(Word.ALIKE, _number(payload.alike))
        self._put(Word.SAVER, self._saver)
        self._put(Word.POSTED, phase)
        self._wait_for(peers, Word.POSTED, phase)
        counted = tuple(each for each in peers if self._table.get(each, here, Word.WEIGHT))
        self._compare({*counted, self.replica}, Word.SHAPES, "train other parameters or have other buffers")
        self._compare(counted, Word.ALIKE, "have other rates, loss scales or loaded states")
        if any(self._table.get(each, here, Word.SHAPES) != self._get(Word.SHAPES) for each in peers):
            self._wait(lambda: False)  # one that joins is another model, and ends by an error of its own
        memories = {each: self._memory(each, layout.size) for each in peers}
        layout.sum(memories, counted, peers.index(self.replica))
        self._put(Word.SUMMED, phase)
        self._wait_for(peers, Word.SUMMED, phase)
        saver = self._table.get(counted[0], here, Word.SAVER)
        saver = saver if saver in counted else counted[0]
        return Outcome(phase, dict(self._members), counted, saver=saver), layout.take(memories, counted[0])

    def _phase_of_others(self) -> int:
        """The phase of those that have the state, which this rank does not know."""
        found: list[int] = []

        def look() -> bool:
            for each in self._members:
                posted = self._table.get(each, self._position, Word.POSTED)
                if posted >> 32 == self.generation and self._table.get(each, self._position, Word.WEIGHT):
                    found.append(posted)
            return bool(found)

        self._wait(look)
        return found[0]

    def _compare(self, replicas: Iterable[int], word: Word, what: str) -> None:
        numbers = {each: self._table.get(each, self._position, word) for each in sorted(replicas)}
        if len(set(numbers.values())) > 1:
            mine = [each for each, number in numbers.items() if number == self._get(word)]
            others = [each for each in numbers if each not in mine]
            raise DivergenceError(
                f"the replicas {_listed(mine)} and {_listed(others)} {what}: build and change the same model and "
                "optimizer on all replicas, in the same steps"
            )

    # --- the state of those that join -------------------------------------------------------------------------

    def hand_over(
        self, outcome: Outcome, payload: Payload, give: Callable[[Callable[[memoryview], None]], None],
        take: Callable[[bytearray], None],
    ) -> bool:  # fmt: skip
        """After a step with replicas that join: the first of the others gives them its state. True if this rank has it.

        ``give`` calls what it is given with the parts of the state, one after the other. ``take`` puts the state in
        place; all ranks of the replica have it then.
        """
        source, at = outcome.counted[0], _Layout(payload).size
        joining = [each for each in outcome.members if each not in outcome.counted]
        if joining and self.replica == source:
            self._give(outcome, joining, at, give)
        if self.replica not in joining:
            return True
        content = self._read(outcome, source, at)
        self._put(Word.MISSED if content is None else Word.TAKEN, outcome.phase)
        mates = [(self.replica, position) for position in range(self._table.positions)]
        missed = False

        def all_know() -> bool:
            nonlocal missed
            missed = any(self._table.get(*mate, Word.MISSED) >= outcome.phase for mate in mates)
            return missed or all(self._table.get(*mate, Word.TAKEN) >= outcome.phase for mate in mates)

        self._wait(all_know, changes=False)
        if missed or content is None:
            return False
        take(content)
        self._put(Word.JOINED, self._start)
        self.holds = True
        return True

    def _give(
        self, outcome: Outcome, joining: Sequence[int], at: int,
        give: Callable[[Callable[[memoryview], None]], None],
    ) -> None:  # fmt: skip
        file, here = self._table.file(self.replica, self._position), self._position
        end = at

        def write(part: memoryview) -> None:
            nonlocal end
            while part:
                done = os.pwrite(file, part, end)
                part, end = part[done:], end + done

        try:
            give(write)
        except Exception as error:  # the one that asked ends; this one goes on
            log.warning("the state cannot be given to a replica that joins: %s", error)
            end = at
        self._put(Word.SIZE, end - at)
        self._put(Word.GIVEN, outcome.phase)

        def done(replica: int) -> bool:
            words = (self._table.get(replica, here, word) for word in (Word.TAKEN, Word.MISSED))
            return any(each >= outcome.phase for each in words) or self._is_lost(outcome, replica)

        self._wait(lambda: all(map(done, joining)), changes=False)
        os.ftruncate(file, at)  # the system gets the memory back

    def _read(self, outcome: Outcome, source: int, at: int) -> bytearray | None:
        """The state that the source has shown; None if it was lost before."""
        here, lost = self._position, False

        def look() -> bool:
            nonlocal lost
            lost = self._is_lost(outcome, source)
            return lost or self._table.get(source, here, Word.GIVEN) >= outcome.phase

        self._wait(look, changes=False)
        if self._table.get(source, here, Word.GIVEN) < outcome.phase:
            return None
        content = bytearray(self._table.get(source, here, Word.SIZE))
        if not content:
            raise UsageError(f"replica {source} cannot give its state to one that joins: its log says why")
        view, done = memoryview(content), 0
        while done < len(content):
            done += os.preadv(self._table.file(source, here), [view[done:]], at + done)
        return content

    def _is_lost(self, outcome: Outcome, replica: int) -> bool:
        _, members, _ = self._table.members()
        return members.get(replica) != outcome.members[replica]

    # --- waiting ----------------------------------------------------------------------------------------------

    def _wait_for(self, replicas: Sequence[int], word: Word, phase: int) -> None:
        here, table = self._position, self._table
        self._wait(lambda: all(table.get(each, here, word) >= phase for each in replicas))

    def _wait(self, there: Callable[[], bool], changes: bool = True) -> None:
        """Until it is there. ``changes``: or there is another generation, which is an error of this module's."""
        naps = self._naps()
        while not there():
            if changes and self._table.generation != self.generation:
                raise _Changed
            next(naps)

    def _naps(self) -> Iterator[None]:
        nap_s, longest_s = _NAPS_S
        noted_s = time.monotonic()
        while True:
            time.sleep(nap_s)
            nap_s = min(longest_s, nap_s * 1.5)
            if time.monotonic() - noted_s > _NOTE_S:
                noted_s = time.monotonic()
                self._wait_hook()
            yield

    def _ranks(self, members: Iterable[int]) -> list[tuple[int, int]]:
        return [(replica, position) for replica in members for position in range(self._table.positions)]

    def _get(self, word: Word) -> int:
        return self._table.get(self.replica, self._position, word)

    def _put(self, word: Word, value: int) -> None:
        self._table.put(self.replica, self._position, word, value)

    def _memory(self, replica: int, size: int) -> mmap.mmap:
        """A rank's data at this rank's position; this rank's own is made as large as needed."""
        found = self._maps.get(replica)
        if found is None or len(found) < size:
            file = self._table.file(replica, self._position)
            if replica == self.replica and os.fstat(file).st_size < size:
                os.ftruncate(file, size)
            found = self._maps[replica] = mmap.mmap(file, size)
        return found


class _Layout:
    """The bytes of a payload: tensors to average by dtype, those of the first replica, and sums behind them."""

    def __init__(self, payload: Payload) -> None:
        at = 0
        self._flats: dict[torch.dtype, tuple[int, int]] = {}
        """Of each dtype, the first byte and the number of values."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in payload.averaged):
            count = sum(tensor.numel() for tensor in payload.averaged if tensor.dtype == dtype)
            self._flats[dtype] = at, count
            at = _aligned(at + count * dtype.itemsize)
        self._sums = self._averaged_end = at
        self._first: list[int] = []
        for tensor in payload.first:
            self._first.append(at)
            at = _aligned(at + tensor.nbytes)
        self._behind = at
        self.size = max(mmap.PAGESIZE, at + self._averaged_end)
        self._payload = payload

    def put(self, payload: Payload, memory: mmap.mmap) -> None:
        for dtype in self._flats:
            flat, done = self._flat(memory, dtype), 0
            for tensor in payload.averaged:
                if tensor.dtype == dtype:
                    flat[done : done + tensor.numel()].copy_(tensor.detach().reshape(-1))
                    done += tensor.numel()
        for at, tensor in zip(self._first, payload.first, strict=True):
            _view(memory, tensor.dtype, at, tensor.numel()).copy_(tensor.detach().reshape(-1))

    def sum(self, memories: dict[int, mmap.mmap], counted: Sequence[int], part: int) -> None:
        """Average the part of that number, into the memory of the peer of that number."""
        own = memories[sorted(memories)[part]]
        for dtype, (_, count) in self._flats.items():
            begin, end = _part(count, part, len(memories))
            target = self._flat(own, dtype, sums=True)[begin:end].zero_()
            for each in counted:
                target += self._flat(memories[each], dtype)[begin:end]
            target /= len(counted)

    def take(self, memories: dict[int, mmap.mmap], first: int) -> list[Tensor]:
        """The averages and the first replica's tensors, in memory of their own."""
        flats = {}
        for dtype, (_, count) in self._flats.items():
            flat = flats[dtype] = torch.empty(count, dtype=dtype)
            for number, each in enumerate(sorted(memories)):
                begin, end = _part(count, number, len(memories))
                flat[begin:end] = self._flat(memories[each], dtype, sums=True)[begin:end]
        found, done = [], dict.fromkeys(flats, 0)
        for tensor in self._payload.averaged:
            begin = done[tensor.dtype]
            done[tensor.dtype] = end = begin + tensor.numel()
            found.append(flats[tensor.dtype][begin:end].view(tensor.shape))
        for at, tensor in zip(self._first, self._payload.first, strict=True):
            value = _view(memories[first], tensor.dtype, at, tensor.numel())
            found.append(value.clone().view(tensor.shape))
        return found

    def _flat(self, memory: mmap.mmap, dtype: torch.dtype, sums: bool = False) -> Tensor:
        at, count = self._flats[dtype]
        return _view(memory, dtype, at + sums * self._behind, count)


def _view(memory: mmap.mmap, dtype: torch.dtype, at: int, count: int) -> Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at)


def _part(count: int, number: int, parts: int) -> tuple[int, int]:
    return count * number // parts, count * (number + 1) // parts


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED


def _number(of: object) -> int:
    """A number of 62 bits, the same for the same plain values."""
    return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "little") >> 2


def _listed(replicas: Sequence[int]) -> str:
    return ", ".join(map(str, replicas))
