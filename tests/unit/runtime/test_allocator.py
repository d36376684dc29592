"""What is asked of malloc, and what the user's own settings keep."""

from __future__ import annotations

import ctypes
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


def test_freed_memory_is_kept(library: Library):
    assert allocator.keep_memory({})
    assert sorted(library.told) == [(-8, 1), (-3, 1 << 30), (-1, 1 << 30)]


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
