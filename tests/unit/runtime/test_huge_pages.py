"""Which memory is joined to huge pages, when, and that its contents and amount stay."""

from __future__ import annotations

import ctypes
import mmap
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.runtime import huge_pages
from weft.runtime.huge_pages import HugePages, huge_page, join, own_memory, used_pieces

PAGE = 2 << 20
PIECES = 4
MAPPINGS = """\
55d0c0000000-55d0c0400000 r-xp 00000000 fe:00 123                        /usr/bin/python3.11
55d0c1000000-55d0c1800000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7f0000200000-7f0000600000 rw-p 00000000 00:00 0
7f0000600000-7f0000700000 ---p 00000000 00:00 0
7f0000700000-7f0000900000 rw-s 00000000 00:05 77                         /memfd:ring (deleted)
7f0000900000-7f0000a00000 rw-p 00100000 fe:00 456                        /usr/lib/lib with blanks.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
"""


@pytest.fixture
def memory() -> Iterator[tuple[mmap.mmap, int]]:
    """Room for ``PIECES`` whole pieces, untouched, and the address of the first of them."""
    room = mmap.mmap(-1, (PIECES + 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = (ctypes.c_char * len(room)).from_buffer(room)
    address = -(-ctypes.addressof(held) // PAGE) * PAGE
    offset = address - ctypes.addressof(held)
    del held
    room.seek(offset)
    yield room, address
    room.close()


def touch(room: mmap.mmap, pages: int) -> None:
    """Write to the next ``pages`` small pages."""
    for _ in range(pages):
        room.write(b"weft")
        room.seek(mmap.PAGESIZE - 4, 1)


def test_only_memory_of_its_own_counts():
    assert own_memory(MAPPINGS) == [
        (0x55D0C1000000, 0x55D0C1800000),
        (0x7F0000000000, 0x7F0000600000),
    ]


def test_only_pieces_that_are_nearly_full_count(memory: tuple[mmap.mmap, int]):
    room, address = memory
    small = PAGE // mmap.PAGESIZE
    touch(room, small + 1)  # one piece, and one page of the next
    room.seek((small - 1) * mmap.PAGESIZE, 1)
    touch(room, small - 2)  # nearly all of the third
    within = [piece for piece in used_pieces(PAGE, 0) if address <= piece < address + PIECES * PAGE]
    assert within == [address, address + 2 * PAGE]


def huge_bytes_at(address: int) -> int:
    """What the kernel says is in huge pages of the mapping that ``address`` lies in."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)[
        1:
    ]:
        begin, end = (int(bound, 16) for bound in mapping.split(None, 1)[0].split("-"))
        if begin <= address < end:
            found = re.search(r"^AnonHugePages:\s+(\d+) kB", mapping, re.M)
            assert found is not None
            return int(found[1]) << 10
    raise AssertionError(f"no mapping at {address:x}")


def can_join() -> bool:
    """Whether the kernel joins pages when it is asked to: Linux 6.1 and later, unless it is forbidden."""
    if huge_page() != PAGE:
        return False
    with mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.write(b"\1" * len(room))
        held = (ctypes.c_char * len(room)).from_buffer(room)
        address = -(-ctypes.addressof(held) // PAGE) * PAGE
        del held
        return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 25) == 0


@pytest.mark.skipif(not can_join(), reason="this kernel does not join pages on request")
def test_full_pieces_become_one_page_each_and_keep_their_contents(memory: tuple[mmap.mmap, int]):
    room, address = memory
    contents = bytes(range(256)) * (2 * PAGE // 256)
    join(PAGE, 0, time.monotonic() + 60)  # the kernel may count neighbours as one mapping with the room
    room.write(contents)
    before = huge_bytes_at(address)
    assert join(PAGE, address, time.monotonic() + 60) == 0
    assert huge_bytes_at(address) - before == 2 * PAGE, "the two that were full, not the empty ones"
    room.seek(-len(contents), 1)
    assert room.read(len(contents)) == contents


def test_a_look_that_ran_out_of_time_is_gone_on_with(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huge_pages, "used_pieces", lambda page, start: iter(range(start, 5)))
    assert join(PAGE, 2, time.monotonic() - 1) == 2
    assert [start for _, start, _ in looks_of(monkeypatch, [10.0, 10.0, 10.0], {0: 7, 7: 9, 9: 0})] == [
        0,
        7,
        9,
    ]


def test_a_look_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch):
    short = looks_of(monkeypatch, [0.01] * 1010)
    assert [at for at, _, _ in short] == pytest.approx([2.5, 5.0, 7.5, 10.0], abs=0.05)
    assert [time_s for _, _, time_s in short] == pytest.approx([0.05] * 4, abs=0.001)
    long = looks_of(monkeypatch, [5.0, 5.0, 600.0])
    assert [time_s for _, _, time_s in long] == pytest.approx([0.1, 0.1, 0.25])


def looks_of(
    monkeypatch: pytest.MonkeyPatch, steps: list[float], reached: dict[int, int] | None = None
) -> list[tuple[float, int, float]]:
    """When each look began after the first step's start, at which address, and its time, on a clock of these steps."""
    now, looks = [0.0], []

    def joined(page: int, start: int, deadline_s: float) -> int:
        looks.append((now[0], start, deadline_s - now[0]))
        return (reached or {}).get(start, 0)

    monkeypatch.setattr(huge_pages, "huge_page", lambda: PAGE)
    monkeypatch.setattr(huge_pages, "join", joined)
    monkeypatch.setattr(huge_pages.time, "monotonic", lambda: now[0])
    pages = HugePages()
    for step_s in [*steps, 0.0]:
        pages.look()
        now[0] += step_s
    return looks


@pytest.mark.parametrize(
    "files", [{}, {"enabled": "always madvise [never]\n", "hpage_pmd_size": "2097152\n"}]
)
def test_nothing_is_done_where_it_is_forbidden_or_unknown(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(huge_pages, "SYSTEM", tmp_path)
    monkeypatch.setattr(huge_pages, "join", lambda *_: pytest.fail("joined"))
    pages = HugePages()
    assert pages.page == 0
    pages.look()


def test_the_size_of_a_page_is_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "hpage_pmd_size").write_text("33554432\n")
    monkeypatch.setattr(huge_pages, "SYSTEM", tmp_path)
    assert huge_page() == 32 << 20
