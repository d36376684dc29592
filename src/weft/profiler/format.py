"""The file of one rank: a header, then records of one size, little-endian.

    header   64 bytes   magic  version  record size  rank  ranks  clock offset  clock  checksum
    record   32 bytes   start  end  step  microbatch  stage  peer  kind  what  mark

Times are seconds on the process's own clock (`time.perf_counter`). The offset is what to add for the wall
clock's. Ranks with the same `clock` (one host, one boot) share theirs, so that their spans line up exactly, and
only ranks of different hosts depend on how well the hosts' wall clocks agree.

A process may die at any byte: a reader takes the records that are whole. A record is plausible if its mark
is right, so that a part that was overwritten or lost is noticed.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from weft.errors import FormatError
from weft.timeline import KINDS, LATEST_S
from weft.untrusted import MOST_RANKS

MAGIC = b"WEFTSPAN"
VERSION = 1
HEADER_BYTES = 64
RECORD = struct.Struct("<ddiihhBBH")
MARK = 0x5EAF
CONTENTS = ("", "value", "gradient", "signature", "shapes", "read value", "output", "begin")
"""What a message was, for sends and receives."""
KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
CONTENT_CODES = {what: code for code, what in enumerate(CONTENTS)}

_HEADER = struct.Struct("<8sIIiid16s")
_CHECK = struct.Struct("<I")


class Header(NamedTuple):
    """Whose spans these are, and how its clock compares to others."""

    rank: int
    ranks: int
    offset_s: float
    """To add to the file's times for seconds since 1970."""
    clock: bytes
    """16 bytes, equal for ranks whose `perf_counter` is one clock."""

    def pack(self) -> bytes:
        """The header's 64 bytes."""
        body = _HEADER.pack(
            MAGIC, VERSION, RECORD.size, self.rank, self.ranks, self.offset_s, self.clock
        ).ljust(HEADER_BYTES - _CHECK.size, b"\0")
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, content: bytes, name: str) -> Header:
        """Read it from the start of a file; ``name`` is that of the file, for errors."""
        if not content.startswith(MAGIC):
            raise FormatError(
                f"{name} is not a recording of weft: it begins with {content[:8]!r} instead of {MAGIC!r}"
            )
        if len(content) < HEADER_BYTES:
            raise FormatError(
                f"{name} has {len(content)} bytes, its header alone has {HEADER_BYTES}: "
                "the rank ended before it could write it; record again"
            )
        _, version, size, rank, ranks, offset_s, clock = _HEADER.unpack_from(content)
        if version != VERSION or size != RECORD.size:
            raise FormatError(
                f"{name} is a recording of version {version}, and this weft reads version {VERSION}: "
                "read it with the weft that wrote it, or record again"
            )
        body = content[: HEADER_BYTES - _CHECK.size]
        if _CHECK.unpack_from(content, HEADER_BYTES - _CHECK.size)[0] != zlib.crc32(body):
            raise FormatError(f"{name} has a damaged header, so its times mean nothing: record again")
        if not rank < ranks <= MOST_RANKS or not abs(offset_s) <= LATEST_S:
            raise FormatError(
                f"{name} says that it is of rank {rank} of {ranks} at {offset_s} s, which cannot be: record again"
            )
        return cls(rank, ranks, offset_s, clock)
