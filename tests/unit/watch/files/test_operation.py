"""The operation on a file in which a process stands, and for how long."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.watch.files import operation
from weft.watch.files.operation import Look, Operation, Outside, find, in_words
from weft.watch.heartbeat import Page

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="Linux shows that"
)


def found(pid: int, text: str) -> bool:
    """Whether a process is seen in an operation before long."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        seen = find(pid)
        if seen is not None and text in seen.text:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "part-3")
    return tmp_path / "part-3"


def test_a_thread_that_opens_and_reads_is_seen(pipe: Path):
    thread = threading.Thread(target=lambda: pipe.read_bytes(), daemon=True)
    thread.start()
    assert found(os.getpid(), f"opens {pipe}")
    with pipe.open("wb"):
        assert found(os.getpid(), f"reads {pipe}")
        first, again = find(os.getpid()), find(os.getpid())
        assert first is not None and first == again, "the same call is known again"
    thread.join(30)
    assert find(os.getpid()) is None


IN_CHILD: dict[str, Callable[[Path], str]] = {
    "a path from its own folder": lambda pipe: (
        f"import os\nos.chdir({str(pipe.parent)!r})\nopen('{pipe.name}')"
    ),
    "a call that holds Python's lock": lambda pipe: (
        f"import ctypes\nctypes.PyDLL(None).open({os.fsencode(pipe)!r}, 0)"
    ),
}


@pytest.mark.parametrize("how", IN_CHILD)
def test_a_process_is_seen_by_the_one_that_started_it(how: str, pipe: Path):
    child = subprocess.Popen([sys.executable, "-c", IN_CHILD[how](pipe)])
    try:
        assert found(child.pid, f"opens {pipe}")
        assert found(os.getpid(), f"opens {pipe} in its process {child.pid}")
        child.send_signal(19)  # SIGSTOP: now it is the signal that holds it
        assert any(find(child.pid) is None or time.sleep(0.02) for _ in range(1000))
    finally:
        child.kill()
        child.wait()


def test_processes_that_wait_for_others_are_in_no_operation():
    waits = ["import os; os.read(os.pipe()[0], 1)", "import time; time.sleep(60)", "while True: pass"]
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in waits]
    try:
        time.sleep(0.3)
        assert [find(child.pid) for child in children] == [None] * 3
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert find(children[0].pid) is None, "it is gone"


def test_calls_are_told_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rank-0001.safetensors"
    with path.open("wb") as file:
        descriptor, more = hex(file.fileno()), ["0x0"] * 7
        for machine, numbers in {"x86_64": (0, 1, 74, 217), "aarch64": (63, 64, 82, 61)}.items():
            words = [in_words(os.getpid(), [str(number), descriptor, *more], machine) for number in numbers]
            assert words == [f"{verb} {path}" for verb in ("reads", "writes", "flushes", "lists")]
        assert in_words(os.getpid(), ["0", descriptor, *more], "riscv64") == ""
        assert in_words(os.getpid(), ["202", descriptor, *more], "x86_64") == "", "a lock in memory"
    with open("/dev/null", "rb") as file:
        assert in_words(os.getpid(), ["0", hex(file.fileno()), *more], "x86_64") == ""
    assert in_words(os.getpid(), ["running"]) == ""
    assert in_words(os.getpid(), ["-1", "0x0", "0x0"]) == "waits for a file that is mapped into its memory"
    folder = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(operation.os, "readlink", lambda link: {f"/proc/7/fd/{folder}": "/data"}[link])
    monkeypatch.setattr(operation, "open", lambda *_, **__: (tmp_path / "memory").open("rb"), raising=False)
    (tmp_path / "memory").write_bytes(b"." * 16 + b"part-3\0more")
    assert in_words(7, ["257", hex(folder), "0x10"], "x86_64") == "opens /data/part-3"
    os.close(folder)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_operation_counts_from_when_it_was_first_seen():
    clock, shown = Clock(), [Operation("reads /x", "call 1")]
    one = Look(7, lambda pid: shown[0], clock)
    seen = {}
    for clock.now in range(12):
        if clock.now == 6:
            shown[0] = Operation("reads /x", "call 2")
        seen[clock.now] = one.observe(mark=max(0, clock.now - 8))
    assert [seen[at] for at in (0, 1)] == [("", 0.0)] * 2, (
        "a process that turned to something just now is left alone"
    )
    assert [seen[at] for at in (2, 5)] == [("reads /x", 0), ("reads /x", 3)]
    assert [seen[at] for at in (6, 8)] == [("reads /x", 0), ("reads /x", 2)], "another call"
    assert [seen[at] for at in (9, 10, 11)] == [("", 0.0)] * 3, "it gets on"


def test_it_looks_once_a_second():
    clock, looks = Clock(), []
    one = Look(7, lambda pid: looks.append(pid), clock)
    for clock.now in (tenth / 10 for tenth in range(50)):
        one.observe(None)
    assert len(looks) == 3


@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_that_shows_nothing_itself_is_seen_from_outside(joined: bool, monkeypatch: pytest.MonkeyPatch):
    clock, page, shown = Clock(), Page.private(1), [Operation("opens /x", "call")]
    monkeypatch.setattr(operation, "Look", lambda pid: Look(pid, lambda _: shown[0], clock))
    outside = Outside(page)
    if joined:
        page.slot(0).open(30.0, 600.0)
    for clock.now in range(5):
        outside.look(0, os.getpid())
    assert (page.sign(0).operation, page.sign(0).operation_s) == ("opens /x", 2.0)
    if joined:
        page.slot(0).beat()  # from now on it says so itself
    else:
        shown.clear()
        shown.append(None)  # type: ignore[arg-type]
    clock.now = 5
    outside.look(0, os.getpid())
    assert page.sign(0).operation == ""
