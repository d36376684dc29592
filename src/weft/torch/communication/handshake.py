"""Packed objects between two ranks: a header that says what comes, an answer, and then the object itself.

    header   uint8[512]: magic, call, group, bytes of text, parts, bytes of parts, bytes of the body, pickled; a text
    body     the sizes of the parts, the text, and all small parts in one piece
    parts    the large ones, each by itself

The receiver knows all sizes before it takes anything and refuses what is too much; nothing is believed that does not
add up. Headers are sent without waiting, and an answer is expected at the same time: so two ranks that both send, or
that call different things, see each other's header instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import TransportError
from weft.torch.session.session import Session
from weft.torch.tensors.messages import Packed, unpack
from weft.transport.tags import OBJECTS
from weft.transport.torch_dist import to_bytes

SEND, BROADCAST, ALLGATHER, BARRIER, READY, REFUSED = range(6)
CALLS = ("send", "broadcast", "allgather", "barrier", "an answer", "a refusal")

MAX_TEXT = 1 << 27
MAX_PARTS = 1 << 20
SMALL = 1 << 16
"""Parts of fewer bytes travel in the body."""

_abandoned: list[Any] = []
"""Headers of calls that failed; their memory may still be read until the process ends."""
_MAGIC = 0x77656F62
_HEADER, _TEXT_AT = 512, 64


class Told(NamedTuple):
    """A header: what a rank calls (``axis``: for the group of which axis), and how much it would send."""

    call: int
    axis: int
    text_bytes: int = 0
    parts: int = 0
    part_bytes: int = 0
    body_bytes: int = 0
    pickled: int = 0

    def excess(self, max_bytes: int, allow_pickle: bool) -> str:
        """Why it is not taken; empty if it is."""
        if self.pickled and not allow_pickle:
            return "it is pickled, which needs allow_pickle=True here too"
        if not 0 <= self.text_bytes <= MAX_TEXT or not 0 <= self.parts <= MAX_PARTS:
            return f"its text has {self.text_bytes} bytes and it has {self.parts} parts: send it in pieces"
        if not 0 <= self.part_bytes <= max_bytes:
            return f"its tensors and arrays have {self.part_bytes} bytes, more than max_bytes={max_bytes}"
        rest = self.body_bytes - 8 * self.parts - self.text_bytes
        if not 0 <= rest <= self.part_bytes:
            return "its sizes do not add up"
        return ""


def told_of(call: int, axis: int, packed: Packed | None) -> Told:
    """The header for an object."""
    if packed is None:
        return Told(call, axis)
    sizes, text = packed.sizes, len(packed.text.encode())
    body = 8 * len(sizes) + text + sum(size for size in sizes if size < SMALL)
    return Told(call, axis, text, len(sizes), sum(sizes), body, int(bool(packed.pickled)))


def body_of(packed: Packed) -> Tensor:
    """Sizes, text and small parts."""
    pieces = [torch.tensor(packed.sizes, dtype=torch.int64).view(torch.uint8), _bytes(packed.text.encode())]
    return torch.cat([*pieces, *(blob for blob in packed.blobs if blob.numel() < SMALL)])


class Body:
    """What has arrived of an object: its sizes are checked against what was told."""

    def __init__(self, content: Tensor, told: Told) -> None:
        table = 8 * told.parts
        self.sizes: list[int] = content[:table].clone().view(torch.int64).tolist()
        self._text = to_bytes(content[table : table + told.text_bytes])
        small = [size for size in self.sizes if size < SMALL]
        if any(size < 0 for size in small) or sum(self.sizes) != told.part_bytes:
            raise TransportError(
                "the sizes of what arrived do not add up: do all ranks run the same version of weft?"
            )
        if table + told.text_bytes + sum(small) != content.numel():
            raise TransportError(
                "the sizes of what arrived do not add up: do all ranks run the same version of weft?"
            )
        pieces = iter(content[table + told.text_bytes :].split(small) if small else ())
        self.parts = [next(pieces).clone() if size < SMALL else None for size in self.sizes]

    def large(self) -> Iterable[int]:
        """The numbers of the parts that come by themselves."""
        return [number for number, part in enumerate(self.parts) if part is None]

    def value(self, device: torch.device, allow_pickle: bool) -> Any:
        """The object, when all parts are there."""
        parts = [part for part in self.parts if part is not None]
        return unpack(self._text.decode(), parts, device, allow_pickle)


class Link:
    """Headers and objects over the group of all ranks; ranks go by their global numbers."""

    def __init__(self, session: Session) -> None:
        self._group = session.group("world")
        self._device = session.device
        self._sending: list[tuple[Any, Tensor]] = []

    def tell(self, peer: int, told: Told, text: str = "") -> None:
        """Send a header, and the start of a text with it; does not wait for it to be taken."""
        content = text.encode()[: _HEADER - _TEXT_AT - 8]
        header = torch.zeros(_HEADER, dtype=torch.uint8)
        header[:_TEXT_AT] = torch.tensor([_MAGIC, *told]).view(torch.uint8)
        header[_TEXT_AT : _TEXT_AT + len(content)] = _bytes(content)
        self._sending.append((dist.isend(header, peer, group=self._group, tag=OBJECTS), header))

    def expect(self, peer: int) -> tuple[Any, Tensor]:
        """A receive for the peer's next header."""
        header = torch.empty(_HEADER, dtype=torch.uint8)
        return dist.irecv(header, peer, group=self._group, tag=OBJECTS), header

    def heard(self, expected: tuple[Any, Tensor]) -> tuple[Told, str]:
        """That header and its text, when it is there."""
        work, header = expected
        work.wait()
        magic, *numbers = header[:_TEXT_AT].clone().view(torch.int64).tolist()
        told = Told(*numbers)
        if magic != _MAGIC or not 0 <= told.call < len(CALLS):
            raise TransportError("a message that weft did not send arrived in its place: restart the job")
        return told, to_bytes(header[_TEXT_AT:]).rstrip(b"\0").decode(errors="replace")

    def flush(self) -> None:
        """Return when the headers on their way have been taken."""
        while self._sending:
            self._sending.pop()[0].wait()

    def forget(self) -> None:
        """Do not wait for headers that perhaps nobody takes any more."""
        _abandoned.extend(self._sending)
        self._sending.clear()

    def send(self, peer: int, packed: Packed) -> None:
        """The object itself, to a rank that is ready for it."""
        for content in (body_of(packed), *(blob for blob in packed.blobs if blob.numel() >= SMALL)):
            dist.send(content, peer, group=self._group, tag=OBJECTS)

    def receive(self, peer: int, told: Told, allow_pickle: bool) -> Any:
        """What :meth:`send` sends; never more than was told."""
        self.flush()
        body = Body(self._take(peer, told.body_bytes), told)
        for number in body.large():
            body.parts[number] = self._take(peer, body.sizes[number])
        return body.value(self._device, allow_pickle)

    def _take(self, peer: int, size: int) -> Tensor:
        content = torch.empty(size, dtype=torch.uint8)
        dist.recv(content, peer, group=self._group, tag=OBJECTS)
        return content


def _bytes(content: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )


def exchange(
    packed: Packed,
    group: Any,
    ranks: tuple[int, ...],
    device: torch.device,
    max_bytes: int,
    allow_pickle: bool,
) -> list[Any]:
    """Every rank's object, on every rank of ``group``, which all call this."""
    mine = told_of(ALLGATHER, 0, packed)
    headers = [torch.empty(len(mine), dtype=torch.int64) for _ in ranks]
    dist.all_gather(headers, torch.tensor(mine), group=group)
    tolds = [Told(*header.tolist()) for header in headers]
    faults = [
        f"of rank {rank}: {fault}"
        for rank, told in zip(ranks, tolds, strict=True)
        if (fault := told.excess(max_bytes, allow_pickle))
    ]
    if faults:
        raise TransportError("allgather() does not take the object " + "; ".join(faults))
    longest = max(told.body_bytes for told in tolds)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.body_bytes] = body_of(packed)
    contents = [torch.empty(longest, dtype=torch.uint8) for _ in ranks]
    dist.all_gather(contents, padded, group=group)
    bodies = [Body(content[: told.body_bytes], told) for content, told in zip(contents, tolds, strict=True)]
    for rank, body in zip(ranks, bodies, strict=True):
        for number in body.large():
            own = rank == dist.get_rank()
            part = packed.blobs[number].clone() if own else torch.empty(body.sizes[number], dtype=torch.uint8)
            dist.broadcast(part, rank, group=group)
            body.parts[number] = part
    return [body.value(device, allow_pickle) for body in bodies]
