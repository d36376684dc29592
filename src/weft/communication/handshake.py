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
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.communication.messages import Packed, unpack
from weft.errors import TransportError
from weft.session.travel import Travel
from weft.transport.channel import OBJECTS
from weft.transport.tensor_bytes import to_bytes

SEND, BROADCAST, ALLGATHER, BARRIER, READY, REFUSED = range(6)
CALLS = ("send", "broadcast", "allgather", "barrier", "an answer", "a refusal")

MAX_TEXT = 1 << 27
MAX_PARTS = 1 << 20
SMALL = 1 << 16
"""Parts of fewer bytes travel in the body."""

_abandoned: list[Any] = []
"""Headers of calls that failed; their memory may still be read until the process ends."""
_MAGIC = 0x77656F62
_HEADER_BYTES, _TEXT_AT = 512, 64


class Member(Protocol):
    """The session of a rank, of any framework, as far as messages between steps need it."""

    tracing: bool
    travel: Travel

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def need_all_replicas(self, what: str) -> None: ...

    def peers(self, axis: str) -> tuple[int, ...]: ...

    def group(self, axis: str) -> Any: ...

    @property
    def rehearsal(self) -> Any: ...

    def doing(self, what: str) -> AbstractContextManager[None]: ...


class Header(NamedTuple):
    """A rank's announcement: the call it makes, for the group of which axis, and the sizes it would send."""

    call: int
    axis: int
    text_bytes: int = 0
    parts: int = 0
    part_bytes: int = 0
    body_bytes: int = 0
    pickled: int = 0

    def find_excess(self, max_bytes: int, allow_pickle: bool) -> str:
        """Why a receiver does not take the object; empty if it does."""
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


def make_header(call: int, axis: int, packed: Packed | None) -> Header:
    """The header of an object, or of a call without one."""
    if packed is None:
        return Header(call, axis)
    sizes, text = packed.sizes, len(packed.text.encode())
    body = 8 * len(sizes) + text + sum(size for size in sizes if size < SMALL)
    return Header(call, axis, text, len(sizes), sum(sizes), body, int(bool(packed.pickled)))


def make_body(packed: Packed) -> Tensor:
    """The first piece of an object: the sizes of all parts, the text and the small parts."""
    pieces = [torch.tensor(packed.sizes, dtype=torch.int64).view(torch.uint8), _bytes(packed.text.encode())]
    return torch.cat([*pieces, *(blob for blob in packed.blobs if blob.numel() < SMALL)])


class Body:
    """The first piece of an object that has arrived; its sizes are checked against the header."""

    def __init__(self, content: Tensor, header: Header) -> None:
        table = 8 * header.parts
        self.sizes: list[int] = content[:table].clone().view(torch.int64).tolist()
        self._text = to_bytes(content[table : table + header.text_bytes])
        small = [size for size in self.sizes if size < SMALL]
        if (
            any(size < 0 for size in small)
            or sum(self.sizes) != header.part_bytes
            or table + header.text_bytes + sum(small) != content.numel()
        ):
            raise TransportError(
                "the sizes of what arrived do not add up: do all ranks run the same version of weft?"
            )
        pieces = iter(content[table + header.text_bytes :].split(small) if small else ())
        self.parts = [next(pieces).clone() if size < SMALL else None for size in self.sizes]

    def large(self) -> Iterable[int]:
        """The numbers of the parts that come by themselves."""
        return [number for number, part in enumerate(self.parts) if part is None]

    def value(self, device: torch.device, allow_pickle: bool) -> Any:
        """The object, when all parts are there."""
        parts = [part for part in self.parts if part is not None]
        return unpack(self._text.decode(), parts, device, allow_pickle)


class Handshake:
    """Headers and objects over the group of all ranks; ranks go by their global numbers."""

    def __init__(self, session: Member) -> None:
        self._group = session.group("world")
        self._device = session.device
        self._sending: list[tuple[Any, Tensor]] = []

    def send_header(self, peer: int, header: Header, text: str = "") -> None:
        """Send a header, and the start of a text with it, without waiting for the peer to take them."""
        start = text.encode()[: _HEADER_BYTES - _TEXT_AT - 8]
        content = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        content[:_TEXT_AT] = torch.tensor([_MAGIC, *header]).view(torch.uint8)
        content[_TEXT_AT : _TEXT_AT + len(start)] = _bytes(start)
        self._sending.append((dist.isend(content, peer, group=self._group, tag=OBJECTS), content))

    def expect_header(self, peer: int) -> tuple[Any, Tensor]:
        """A receive for the peer's next header."""
        content = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        return dist.irecv(content, peer, group=self._group, tag=OBJECTS), content

    def take_header(self, expected: tuple[Any, Tensor]) -> tuple[Header, str]:
        """The header that was expected, and its text, once they are there."""
        work, content = expected
        work.wait()
        magic, *numbers = content[:_TEXT_AT].clone().view(torch.int64).tolist()
        header = Header(*numbers)
        if magic != _MAGIC or not 0 <= header.call < len(CALLS):
            raise TransportError("a message that weft did not send arrived in its place: restart the job")
        return header, to_bytes(content[_TEXT_AT:]).rstrip(b"\0").decode(errors="replace")

    def flush(self) -> None:
        """Return when the headers on their way have been taken."""
        while self._sending:
            self._sending.pop()[0].wait()

    def abandon(self) -> None:
        """Do not wait any more for headers on their way: perhaps nobody takes them."""
        _abandoned.extend(self._sending)
        self._sending.clear()

    def send(self, peer: int, packed: Packed) -> None:
        """Send the object itself, to a rank that is ready to take it."""
        for content in (make_body(packed), *(blob for blob in packed.blobs if blob.numel() >= SMALL)):
            dist.send(content, peer, group=self._group, tag=OBJECTS)

    def receive(self, peer: int, header: Header, allow_pickle: bool) -> Any:
        """The object that the peer's :meth:`send` sends; never more bytes than its header says."""
        self.flush()
        body = Body(self._take(peer, header.body_bytes), header)
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
    mine = make_header(ALLGATHER, 0, packed)
    numbers = [torch.empty(len(mine), dtype=torch.int64) for _ in ranks]
    dist.all_gather(numbers, torch.tensor(mine), group=group)
    headers = [Header(*each.tolist()) for each in numbers]
    faults = [
        f"of rank {rank}: {fault}"
        for rank, header in zip(ranks, headers, strict=True)
        if (fault := header.find_excess(max_bytes, allow_pickle))
    ]
    if faults:
        raise TransportError("allgather() does not take the object " + "; ".join(faults))
    longest = max(header.body_bytes for header in headers)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.body_bytes] = make_body(packed)
    contents = [torch.empty(longest, dtype=torch.uint8) for _ in ranks]
    dist.all_gather(contents, padded, group=group)
    bodies = [
        Body(content[: header.body_bytes], header) for content, header in zip(contents, headers, strict=True)
    ]
    for rank, body in zip(ranks, bodies, strict=True):
        for number in body.large():
            own = rank == dist.get_rank()
            part = packed.blobs[number].clone() if own else torch.empty(body.sizes[number], dtype=torch.uint8)
            dist.broadcast(part, rank, group=group)
            body.parts[number] = part
    return [body.value(device, allow_pickle) for body in bodies]
