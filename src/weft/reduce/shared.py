"""Sums between CPU processes of one host through memory that they share.

A tensor, or a list of tensors as if they were one, is cut into one shard a rank, a shard into parts that fit a slot,
and all ranks go through the parts in rounds. In round k, with n ranks, rank r

    1. copies the k-th part of the other ranks' shards from its tensor into its slot      (contribute)
    2. adds up the k-th part of shard r from all slots and its own tensor, in the order
       of the ranks, and writes the sum into its tensor and its slot                      (reduce)
    3. copies the sums of the other shards from their owners' slots into its tensor       (gather)

Three counters a rank say how many rounds it has contributed, reduced and gathered. There are two slots, so that step 1
of the next round comes before step 3 of this one. Slots are small: what a rank writes, the others read from the cache.
Bytes that each rank copies into shared memory: the tensor's, once. Every sum is made by one rank, so all ranks get the
same bits. A reduce-scatter alone ends after step 2, with its sums in the tensors only; an all-gather alone contributes
the rank's own shard in step 1 and goes on with step 3: so each waits for the others once a round.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from weft.errors import DivergenceError, PeerError, StallError, TransportError, UsageError
from weft.reduce.bucket import bounds
from weft.reduce.exchange import gather_rows
from weft.reduce.worker import Job, Queued, Worker
from weft.transport import segment
from weft.transport.segment import LINE, Segment

SLOTS = 2
PART_BYTES = 1 << 20
"""Of each shard in a round, where a slot of `MOST_SLOT_BYTES` has room for that many ranks. Ranks wait for each other
in each round: with half of it `int8` between hosts took 7 % longer beside the computing (`benchmarks/slow_network`),
with twice as much large sums of one host a fifth longer."""
MOST_SLOT_BYTES = 4 << 20
TIMEOUT = timedelta(minutes=30)
_CONTRIBUTED, _REDUCED, _GATHERED = 0, LINE, 2 * LINE
_NUMEL, _DTYPE = 3 * LINE, 3 * LINE + SLOTS
_SPIN_S = 50e-6
_LONGEST_NAP_S = 2e-3
_LOOK_S = 0.05
_SMALL = 1 << 14
"""Values of a tensor that is not worth the calls of a sum of its own."""
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
)
_DTYPES += (torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128)


class Pieces:
    """Tensors of one dtype, taken as one: ``cut(start, stop)`` are the parts of them that lie there.

    They are 1-D and contiguous, or 2-D with contiguous rows of one width, which are never cut inside of a row.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor for tensor in tensors if tensor.numel()]
        self.dtype = tensors[0].dtype
        self.ends = list(accumulate(tensor.numel() for tensor in self.tensors))
        self.numel = self.ends[-1] if self.ends else 0

    def cut(self, start: int, stop: int) -> list[torch.Tensor]:
        """The values from ``start`` to ``stop``, as views in order."""
        found = []
        number = bisect_right(self.ends, start)
        while start < stop:
            tensor, end = self.tensors[number], self.ends[number]
            begin = end - tensor.numel()
            upto = min(stop, end)
            whole = start == begin and upto == end
            width = tensor.shape[1] if tensor.dim() == 2 else 1
            found.append(tensor if whole else tensor[(start - begin) // width : (upto - begin) // width])
            start = upto
            number += 1
        return found


@dataclass
class _Pass:
    """Tensors on their way through the slots, times ``scale``; ``slots[s][r]``: slot s of rank r, in their dtype."""

    values: Pieces
    scale: float
    shards: list[tuple[int, int]]
    part: int
    slots: list[list[torch.Tensor]]
    first: int
    scatter: bool
    gather: bool
    received: torch.Tensor | None = None  # (ranks, values): shards of others go there, none is summed

    def rounds(self) -> int:
        longest = max(stop - start for start, stop in self.shards)
        return max(1, -(-longest // self.part))

    def pieces(self, round: int, rank: int) -> Iterator[tuple[torch.Tensor, int]]:
        """The round's part of a rank's shard in this rank's tensors, and where in a slot each of it stands."""
        start, stop = self.shards[rank]
        at = start + round * self.part
        place = rank * self.part
        for piece in self.values.cut(min(at, stop), min(at + self.part, stop)):
            yield piece, place
            place += piece.numel()

    def shared(self, round: int, owner: int, place: int, like: torch.Tensor) -> torch.Tensor:
        """The tensor in the owner's slot at that place."""
        found = self.slots[(self.first + round) % SLOTS][owner][place : place + like.numel()]
        return found if like.dim() == 1 else found.view(like.shape)


class HostMemory:
    """Blocking reductions over the ranks ``members`` of a group, which share a host. CPU tensors only.

    All members make the same calls in the same order.
    """

    def __init__(self, members: Sequence[int], own: int, segments: list[Segment], timeout: timedelta) -> None:
        self.members = tuple(members)
        self.rank = own
        self._segments = segments
        self._counters = [segment.counters for segment in segments]
        self._others = [rank for rank in range(len(members)) if rank != own]
        self._timeout_s = timeout.total_seconds()
        self._slot_bytes = segments[own].size // SLOTS
        self._rounds = 0
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    @classmethod
    def connect(
        cls,
        group: dist.ProcessGroup,
        members: Sequence[int] | None = None,
        slot_bytes: int | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> HostMemory:
        """Map the memory of the members. Every rank of the group calls it, each with the members of its own host.

        Args:
            group: A group with a CPU backend (gloo).
            members: The ranks in the group that share this rank's host, in ascending order; all of them if None.
            slot_bytes: How much is in flight at once; by default `PART_BYTES` for each member, up to a limit.
            timeout: After which time another rank's silence is an error.

        Raises:
            TransportError: The members do not share a host, on every rank of the group.
        """
        size, rank = group.size(), group.rank()
        members = list(range(size) if members is None else members)
        slot_bytes = slot_bytes or min(PART_BYTES * len(members), MOST_SLOT_BYTES)
        own, address = (
            Segment.create(SLOTS * slot_bytes) if segment.available() else (None, (os.getpid(), -1, 0, 0))
        )
        described = torch.tensor([*address, slot_bytes], dtype=torch.int64)
        rows = gather_rows(described, group).tolist()
        segments, fault = [], None
        try:
            for member in members:
                mine = member == rank and own is not None
                segments.append(own if mine else Segment.open(tuple(rows[member][:4]), SLOTS * slot_bytes))
        except TransportError as error:
            fault = error
        faults = torch.tensor([int(fault is not None)])
        dist.all_reduce(faults, group=group)
        if faults.item():
            for opened in segments:
                opened.close()  # type: ignore[union-attr]
            raise fault or TransportError(
                "another rank could not map the memory of its host's ranks: see its error"
            )
        return cls(members, members.index(rank), segments, timeout)  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        return len(self.members)

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor, as a view."""
        start, stop = bounds(flat.numel(), self.size)[self.rank]
        return flat[start:stop]

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Replace ``flat`` (1-D, contiguous) by its sum over the members, in its own dtype."""
        self._run([flat], scatter=True, gather=True)

    def sum_pieces(self, tensors: Sequence[torch.Tensor], scale: float) -> None:
        """Replace each tensor (1-D, contiguous, one dtype) by the sum over the members of ``scale`` times it.

        Every member has tensors of the same sizes in the same order. Those that are small travel as one.
        """
        small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
        if len(small) < 2:
            self._run(tensors, scatter=True, gather=True, scale=scale)
            return
        flat = torch.cat(small)
        large = [tensor for tensor in tensors if tensor.numel() > _SMALL]
        self._run([*large, flat], scatter=True, gather=True, scale=scale)
        torch.split_with_sizes_copy(flat, [tensor.numel() for tensor in small], out=small)

    def reduce_scatter(self, flat: torch.Tensor, scale: float = 1.0) -> None:
        """Replace this rank's shard of ``flat`` by the sum over the members of ``scale`` times it; the rest stays."""
        self._run([flat], scatter=True, gather=False, scale=scale)

    def all_gather(self, flat: torch.Tensor) -> None:
        """Replace the other ranks' shards of ``flat`` by those ranks' values."""
        self._run([flat], scatter=False, gather=True)

    def scatter_pieces(self, tensors: Sequence[torch.Tensor]) -> None:
        """:meth:`reduce_scatter` of tensors taken as one, see :class:`Pieces`; other ranks' shards are only read.

        Every member has as many of the same sizes in the same order, and a shard ends where a tensor does.
        """
        self._run(tensors, scatter=True, gather=False)

    def gather_pieces(self, tensors: Sequence[torch.Tensor]) -> None:
        """:meth:`all_gather` of tensors taken as one; see :meth:`scatter_pieces`."""
        self._run(tensors, scatter=False, gather=True)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Write the others' rows for this rank into ``received``. Both are (members, values), contiguous."""
        received[self.rank].copy_(sent[self.rank])
        self._run([sent.view(-1)], scatter=True, gather=False, received=received)

    def _run(
        self, tensors: Sequence[torch.Tensor], scatter: bool, gather: bool, scale: float = 1.0,
        received: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        values = Pieces(tensors)
        if self.size == 1:
            for tensor in values.tensors if scale != 1.0 else ():
                tensor.mul_(scale)
            return
        part = self._slot_bytes // self.size // 64 * 64 // values.dtype.itemsize
        width = max((each.shape[1] for each in values.tensors if each.dim() == 2), default=1)
        if width > part:  # a row takes several rounds
            rows = [row for each in tensors for row in (each.unbind(0) if each.dim() == 2 else [each])]
            values, width = Pieces(rows), 1
        part = part // width * width
        shards = bounds(values.numel, self.size)
        run = _Pass(
            values, scale, shards, part, self._slots(values.dtype), self._rounds, scatter, gather, received
        )
        rounds = run.rounds()
        self._contribute(run, 0)
        for round in range(rounds):
            self._reduce(run, round)
            if round + 1 < rounds:
                self._contribute(run, round + 1)
            self._gather(run, round)
        self._rounds += rounds

    def _slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        if dtype not in self._views:
            self._views[dtype] = [
                [each.view(dtype, slot * self._slot_bytes, self._slot_bytes) for each in self._segments]
                for slot in range(SLOTS)
            ]
        return self._views[dtype]

    def _contribute(self, run: _Pass, round: int) -> None:
        number = run.first + round
        self._await(_GATHERED, number - SLOTS + 1)  # the slot is free
        own = self._counters[self.rank]
        if round == 0:
            own[_NUMEL + number % SLOTS] = run.values.numel
            own[_DTYPE + number % SLOTS] = _DTYPES.index(run.values.dtype)
        for rank in self._others if run.scatter else (self.rank,):
            for piece, place in run.pieces(round, rank):
                slot = run.shared(round, self.rank, place, piece)
                if run.scale == 1.0:
                    slot.copy_(piece)
                else:
                    torch.mul(piece, run.scale, out=slot)
        own[_CONTRIBUTED] = number + 1

    def _reduce(self, run: _Pass, round: int) -> None:
        number = run.first + round
        self._await(_CONTRIBUTED, number + 1)
        if round == 0:
            self._compare(run)
        if run.received is not None:
            start = round * run.part
            for rank in self._others:
                row = run.received[rank, start : start + run.part]
                row.copy_(run.shared(round, rank, self.rank * run.part, row))
        for mine, place in run.pieces(round, self.rank) if run.scatter and run.received is None else ():
            if run.gather:
                parts = [
                    mine if rank == self.rank else run.shared(round, rank, place, mine)
                    for rank in range(self.size)
                ]
                total = run.shared(round, self.rank, place, mine)
                self._sum_parts(parts, run.scale, total)
                mine.copy_(total)
            else:
                first, *rest = (run.shared(round, rank, place, mine) for rank in self._others)
                torch.add(first, mine, alpha=1 if run.scale == 1.0 else run.scale, out=mine)
                for part in rest:
                    mine.add_(part)
        self._counters[self.rank][_REDUCED] = number + 1

    def _sum_parts(self, parts: Sequence[torch.Tensor], scale: float, total: torch.Tensor) -> None:
        """Write the sum of the parts, in their order, into ``total``; the own one counts ``scale`` times."""
        weights = [scale if rank == self.rank and scale != 1.0 else 1 for rank in range(self.size)]
        one, other = (0, 1) if weights[0] == 1 else (1, 0)  # only the second of two can have a weight
        torch.add(parts[one], parts[other], alpha=weights[other], out=total)
        for part, weight in zip(parts[2:], weights[2:], strict=True):
            total.add_(part, alpha=weight)

    def _gather(self, run: _Pass, round: int) -> None:
        number = run.first + round
        if run.gather:
            self._await(_REDUCED if run.scatter else _CONTRIBUTED, number + 1)
            for rank in self._others:
                for piece, place in run.pieces(round, rank):
                    piece.copy_(run.shared(round, rank, place, piece))
        self._counters[self.rank][_GATHERED] = number + 1

    def _compare(self, run: _Pass) -> None:
        slot = run.first % SLOTS
        for rank in self._others:
            numel, dtype = self._counters[rank][_NUMEL + slot], self._counters[rank][_DTYPE + slot]
            if numel != run.values.numel or _DTYPES[dtype] != run.values.dtype:
                raise DivergenceError(
                    f"rank {self.members[self.rank]} adds up {run.values.numel} values of {run.values.dtype} where "
                    f"rank {self.members[rank]} has {numel} of {_DTYPES[dtype]}: every rank must make the same calls"
                )

    def _await(self, counter: int, value: int) -> None:
        """Wait until every other rank's counter has come to ``value``."""
        for rank in self._others:
            if self._counters[rank][counter] < value:
                self._pause(rank, counter, value)

    def _pause(self, rank: int, counter: int, value: int) -> None:
        """Look again at once for a moment, then ever less often: a long wait costs hardly any processor time."""
        counters = self._counters[rank]
        start = time.monotonic()
        next_look = _LOOK_S
        while counters[counter] < value:
            waited = time.monotonic() - start
            if waited < _SPIN_S:
                os.sched_yield()
                continue
            if waited > next_look:
                next_look = waited + _LOOK_S
                self._look(rank, counter, value, waited)
            time.sleep(min(waited / 2, _LONGEST_NAP_S))

    def _look(self, rank: int, counter: int, value: int, waited: float) -> None:
        lives = self._segments[rank].owner_lives()
        if not lives and self._counters[rank][counter] < value:
            raise PeerError(
                self.members[rank], "its process ended before it had done its part of a sum in shared memory"
            )
        if waited > self._timeout_s:
            raise StallError(
                f"rank {self.members[self.rank]} waited {waited:.1f} s for rank {self.members[rank]} in a sum in "
                "shared memory: see what that rank does, or raise the timeout"
            )

    def close(self) -> None:
        """Give the memory back."""
        self._views.clear()
        self._counters.clear()
        for each in self._segments:
            each.close()
        self._segments.clear()


def carries(tensor: torch.Tensor) -> bool:
    """True if shared memory takes such numbers, in whatever shape."""
    return tensor.device.type == "cpu" and tensor.dtype in _DTYPES and tensor.layout == torch.strided


def check(flat: torch.Tensor) -> None:
    """Raise UsageError unless shared memory can add up tensors like ``flat``."""
    if not carries(flat) or flat.dim() != 1 or not flat.is_contiguous():
        raise UsageError(
            f"shared memory adds up flat, contiguous CPU tensors of a number type, not {flat.dtype} of shape "
            f'{tuple(flat.shape)} on {flat.device}: choose the algorithm "direct"'
        )


class SharedMemory:
    """The collective over ``HostMemory``: sums in flight, done by a thread in the order of the calls.

    Moves ``2 N (n - 1) / n`` bytes a rank through memory for N bytes and n ranks, none through the network. CPU tensors
    only; ``benchmarks/all_reduce`` compares it with gloo.
    """

    def __init__(self, group: dist.ProcessGroup, memory: HostMemory) -> None:
        self.group = group
        self.memory = memory
        self._worker = Worker("weft-shared-memory")

    @classmethod
    def connect(cls, group: dist.ProcessGroup, timeout: timedelta = TIMEOUT) -> SharedMemory:
        """Map the memory of all ranks of the group, which share a host; every rank calls it."""
        return cls(group, HostMemory.connect(group, timeout=timeout))

    @property
    def size(self) -> int:
        return self.memory.size

    def all_reduce(self, flat: torch.Tensor) -> Job | Queued:
        """Start to replace ``flat`` by its sum over the ranks; see ``Collective``."""
        check(flat)
        return self._worker.submit(lambda: self.memory.all_reduce(flat), flat)

    def sum_pieces(self, tensors: Sequence[torch.Tensor], scale: float) -> Job | Queued:
        """Start to replace each tensor by the sum of ``scale`` times it; see ``SumsPieces``."""
        for tensor in tensors:
            check(tensor)
        return self._worker.submit(lambda: self.memory.sum_pieces(tensors, scale), tensors[0])

    def close(self) -> None:
        """End the thread and give the memory back; nothing is in flight."""
        self._worker.close()
        self.memory.close()
