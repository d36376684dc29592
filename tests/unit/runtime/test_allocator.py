"""What is asked of malloc, and what the user's own settings keep."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from typing import Any

import pytest

from weft.runtime import allocator

NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX")


class Library:
    """A C library that notes what it is told."""

    def __init__(self, answer: int = 1) -> None:
        self.told: list[tuple[int, int]] = []
        self.answer = answer

    def mallopt(self, option: int, value: int) -> int:
        self.told.append((option, value))
        return self.answer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


@pytest.mark.parametrize(("host_gib", "kept"), [(64, 1 << 30), (4, 1 << 27)])
def test_freed_memory_is_kept_up_to_a_share(
    host_gib: int, kept: int, library: Library, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(allocator, "host_bytes", lambda ranks: (host_gib << 30) // ranks)
    assert allocator.keep_memory({}, ranks=2)
    assert sorted(library.told) == [(-8, 1), (-3, 1 << 30), (-1, kept)]


def test_the_peak_is_that_since_the_last_call():
    allocator.peak_bytes()
    before = allocator.resident_bytes()
    with mmap.mmap(-1, 64 << 20) as taken:  # not what the allocator has kept
        taken.write(bytes(64 << 20))
    assert allocator.peak_bytes() >= before + (56 << 20)
    assert allocator.peak_bytes() < before + (56 << 20)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_set_stays(name: str, library: Library):
    assert allocator.keep_memory({name: "7"})
    assert len(library.told) == 2


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch):
    refusing = Library(answer=0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: refusing)
    assert not allocator.keep_memory({})
    assert len(refusing.told) == 3, "the others are tried all the same"


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_elsewhere_nothing_is_done(error: type[Exception], monkeypatch: pytest.MonkeyPatch):
    def missing(name: Any) -> Any:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not allocator.keep_memory({})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_glibc_takes_it():
    program = "from weft.runtime.allocator import keep_memory; print(keep_memory({}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


MIB = 1 << 20


@pytest.mark.parametrize(
    ("held", "given_back"),
    [
        ([400, 400, 460], 0),
        ([400, 400, 465, 400, 420], 1),
        ([400, 480, 480, 480], 1),
        ([2000, 2200], 0),
        ([2000, 2251, 2251, 2500, 2600], 2),
        ([0, 0, 900, 900], 0),
    ],
)
def test_free_memory_goes_back_when_much_more_is_held(
    held: list[int], given_back: int, monkeypatch: pytest.MonkeyPatch
):
    readings, calls = iter(held), []
    monkeypatch.setattr(allocator, "resident_bytes", lambda: next(readings) * MIB)
    monkeypatch.setattr(allocator, "give_back", lambda: calls.append(1))
    growth = allocator.Growth()
    for _ in range(allocator.EVERY * len(held)):
        growth.look()
    assert len(calls) == given_back and next(readings, None) is None


HOLES = """
import ctypes
from weft.runtime import allocator

def steps(count):
    for _ in range(count * allocator.EVERY):
        growth.look()

assert allocator.keep_memory({})
take, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
take.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
growth = allocator.Growth()
steps(1)
before = allocator.resident_bytes()
large = []
for _ in range(300):
    large.append(take(1 << 20))
    ctypes.memset(large[-1], 1, 1 << 20)
    take(64)  # keeps the pieces around it from becoming one
for each in large:
    free(each)
assert allocator.resident_bytes() > before + (250 << 20)
steps(1)
assert allocator.resident_bytes() < before + (50 << 20)
print("given back")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_free_pieces_between_used_ones_go_back():
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "given back", done.stderr
