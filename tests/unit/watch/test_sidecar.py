"""The process beside a rank: what it sees in Linux's tables, and whom it ends when."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.watch.process import began, is_alive
from weft.watch.sidecar import program
from weft.watch.sidecar.program import (
    Connection,
    Process,
    children,
    clear,
    connections,
    is_rank,
    parsed,
    sockets,
    someone_there,
    unheard,
    watch,
)
from weft.watch.sidecar.start import Beside, launcher_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells this")

STORE = 0x7534
HERE, THERE = "01014D0A", "02014D0A"
LOST = Connection(f"{HERE}:9C4C", f"{THERE}:B2E6", "01", 74, 4, "77")
SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "LOOK_S", 0.02)
    monkeypatch.setattr(program, "PATIENCE_S", 10.0)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    with subprocess.Popen(SLEEPS) as found:
        yield found
        found.kill()


def held(process: subprocess.Popen[bytes]) -> Process:
    return Process(process.pid, began(process.pid) or 0)


def sees(monkeypatch: pytest.MonkeyPatch, *looks: list[Connection]) -> None:
    """What the process sees, one look after the other, and then always the last."""
    left = list(looks)
    monkeypatch.setattr(program, "connections", lambda: left.pop(0) if len(left) > 1 else left[0])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Writes the rank's words to what the process reads."""
    reading, writing = os.pipe()
    before = os.dup(0)
    os.dup2(reading, 0)
    yield writing
    os.dup2(before, 0)
    for descriptor in (reading, writing, before):
        os.close(descriptor)


def test_a_real_connection_is_found_with_its_owner():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            inode = str(os.fstat(client.fileno()).st_ino)
            assert inode in sockets(os.getpid())
            (mine,) = [each for each in connections() if each.inode == inode]
            assert mine.has_port(port) and mine.state == "01" and mine.tried == 0
            assert not mine.to_other_host


@pytest.mark.parametrize(
    ("local", "remote", "state", "there"),
    [
        (f"{HERE}:{STORE:04X}", f"{THERE}:9C4C", "01", True),
        (f"{HERE}:9C4C", f"{THERE}:{STORE:04X}", "01", True),
        (f"{HERE}:9C4C", f"{HERE}:{STORE:04X}", "01", False),  # of this host: it can end the rank itself
        (f"{HERE}:9C4C", f"{THERE}:{STORE:04X}", "08", False),  # the other end is closed
        (f"{HERE}:9C4C", f"{THERE}:9C4D", "01", False),  # another port
        (f"{HERE}:{STORE:04X}", "00000000:0000", "0A", False),  # listens
    ],
)
def test_who_keeps_a_connection_to_the_store(local: str, remote: str, state: str, there: bool):
    assert someone_there([Connection(local, remote, state, 0, 0, "1")], STORE) is there


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        ({}, True),
        ({"inode": "78"}, False),
        ({"tried": 1}, False),
        ({"tried": 0}, False),  # the other end says that it has no room
        ({"waiting": 0}, False),
    ],
)
def test_words_that_nobody_confirms(change: dict[str, object], waits: bool):
    assert unheard([LOST._replace(**change)], {"77"}) is waits


def test_a_line_of_ipv6():
    line = "0: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000100007F:C350 01 0:0 02:000A 0 0 0 9 1"
    found = parsed(line)
    assert found.has_port(0xC350) and not found.to_other_host and found.inode == "9"


def test_a_rank_that_stands_still_is_killed_when_all_others_have_gone(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes], told: int
):
    mine = Connection(f"{HERE}:9C4C", f"{THERE}:{STORE:04X}", "01", 0, 0, "1")
    sees(monkeypatch, [], [mine], [mine], [mine._replace(state="08")])
    os.kill(other.pid, signal.SIGSTOP)
    assert watch(held(other), STORE, program.LOOKS) is False
    assert other.wait(10) == -signal.SIGKILL


def hears(monkeypatch: pytest.MonkeyPatch, told: int, words: dict[int, bytes]) -> list[int]:
    """The first look shows a connection with another host, later ones show none; at some of them there is a word.

    Gives the numbers of the looks.
    """
    mine = Connection(f"{HERE}:9C4C", f"{THERE}:{STORE:04X}", "01", 0, 0, "1")
    looks: list[int] = []

    def look() -> list[Connection]:
        looks.append(len(looks) + 1)
        if looks[-1] in words:
            os.write(told, words[looks[-1]])
        return [mine] if looks[-1] == 1 else []

    monkeypatch.setattr(program, "connections", look)
    return looks


def test_a_rank_has_its_time_to_notice_that_others_have_gone(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes], told: int
):
    """Rank 0 learns of a rank of another host by its silence only, and says then who it was."""
    hears(monkeypatch, told, {15: program.ALL_CAME})
    assert watch(held(other), STORE, 20) is True
    assert other.poll() is None


def test_a_rank_may_work_on_alone_when_others_have_left(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes], told: int
):
    """What it does after its training may take longer than others wait for it."""
    looks = hears(monkeypatch, told, {2: program.LEAVING, 20: program.ALL_CAME})
    assert watch(held(other), STORE, program.LOOKS) is True
    assert other.poll() is None and len(looks) >= 20


@pytest.mark.parametrize("last", ["01", None])
def test_a_rank_stays_while_somebody_is_there_or_nobody_ever_was(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes], told: int, last: str | None
):
    mine = Connection(f"{HERE}:9C4C", f"{THERE}:{STORE:04X}", "01", 0, 0, "1")
    away = [mine._replace(state="08")] if last else []
    left = [*[away] * (program.LOOKS - 1), [mine]] * 3 if last else [[]] * 12

    def look() -> list[Connection]:
        if not left:
            os.write(told, b".")
            return []
        return left.pop(0)

    monkeypatch.setattr(program, "connections", look)
    assert watch(held(other), STORE, program.LOOKS) is True
    assert other.poll() is None


def test_a_launcher_that_nobody_hears_is_ended(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes]
):
    monkeypatch.setattr(program, "sockets", lambda pid: {"77"})
    sees(monkeypatch, [], [LOST], [], [LOST])
    clear(held(other))
    assert other.wait(10) == -signal.SIGTERM


def test_what_a_launcher_has_to_reach_other_hosts_goes_after_it(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes]
):
    """One that does not listen is killed."""
    script = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    monkeypatch.setattr(program, "PATIENCE_S", 0.1)
    monkeypatch.setattr(program, "children", lambda pid: [(other.pid, began(other.pid)), (1, 1)])
    with subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        program.end(held(deaf))
        assert deaf.wait(10) == -signal.SIGKILL
    assert other.wait(10) == -signal.SIGTERM


def test_a_launcher_that_is_heard_or_has_ranks_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes]
):
    monkeypatch.setattr(program, "sockets", lambda pid: {"77"})
    sees(monkeypatch, [LOST._replace(tried=0)])
    clear(held(other))
    assert other.poll() is None
    sees(monkeypatch, [LOST])
    monkeypatch.setattr(program, "children", lambda pid: [(1, 0), (2, 0)])
    monkeypatch.setattr(program, "is_rank", lambda pid: pid == 2)
    clear(held(other))
    assert other.poll() is None


def test_ranks_of_a_launcher_are_its_children_with_a_rank(other: subprocess.Popen[bytes]):
    assert (other.pid, began(other.pid)) in children(os.getpid())
    assert not is_rank(other.pid)
    with subprocess.Popen(SLEEPS, env={"OMPI_COMM_WORLD_RANK": "0"}) as rank:
        assert waited_for(lambda: is_rank(rank.pid)), "its variables show a moment after its start"
        rank.kill()
        gone = (rank.pid, began(rank.pid))
        assert waited_for(lambda: gone not in children(os.getpid())), "not waited for, but it has ended"


def waited_for(look: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_another_process_with_the_same_number_is_not_taken(other: subprocess.Popen[bytes]):
    with pytest.raises(ProcessLookupError, match=f"process {other.pid} is another one"):
        Process(other.pid, 1)


def test_the_launcher_is_found_above_a_script_in_between(tmp_path: Path):
    """`comm` is what a program was started as; so a file of that name stands for mpirun."""
    mpirun = tmp_path / "mpirun.openmpi"
    mpirun.symlink_to("/bin/sh")
    child = subprocess.Popen(
        [str(mpirun), "-c", "sh -c 'sleep 600 & echo $!; wait'; true"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert launcher_of(int(child.stdout.readline())) == child.pid
        assert launcher_of(child.pid) == launcher_of(os.getpid())
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def test_it_ends_when_it_is_dismissed():
    beside = Beside(of_mpirun=False, port=STORE, heartbeat_s=30.0)
    process = beside._process
    assert process is not None
    assert process.poll() is None
    beside.dismiss()
    assert process.wait(10) == 0
    beside.dismiss()


def test_it_ends_when_the_rank_has_ended_without_a_word():
    script = (
        "from weft.watch.sidecar.start import Beside; print(Beside(True, 1, 1.0)._process.pid, flush=True)"
    )
    pid = int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)
    assert waited_for(lambda: not is_alive(pid))
