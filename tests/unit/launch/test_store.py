"""The job's store: what it keeps, and whom it lets in."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

store = pytest.importorskip("weft.launch.store", exc_type=ImportError)

TIMEOUT = timedelta(seconds=20)
SECRET = b"known"
Served = tuple[Any, Any]


@pytest.fixture(params=["unix", "tcp"])
def served(request: pytest.FixtureRequest) -> Served:
    """A server's address and a first connection to it."""
    wanted = f"weft-test-{secrets.token_hex(8)}" if request.param == "unix" else ("127.0.0.1", 0)
    listener = store.listen(wanted)
    address = wanted if request.param == "unix" else listener.getsockname()
    return address, store.JobStore(address, SECRET, TIMEOUT, store.Server(listener, SECRET))


def connected(address: Any) -> socket.socket:
    if isinstance(address, str):
        found = socket.socket(socket.AF_UNIX)
        found.connect(f"\0{address}")
        return found
    return socket.create_connection(address)


def test_what_one_connection_writes_another_one_reads(served: Served):
    one, other = served[1], served[1].clone()
    one.set("a", "b")
    one.set("whole", bytes(range(256)) * 4096)
    assert other.get("a") == b"b" and other.get("whole") == bytes(range(256)) * 4096
    assert (one.add("n", 2), other.add("n", 3), one.add("n", 0)) == (2, 5, 5)
    assert other.check(["a", "n"]) and not other.check(["a", "none"])
    assert one.delete_key("a") and not one.delete_key("a") and not other.check(["a"])
    one.append("list", "x")
    one.append("list", "y")
    assert other.get("list") == b"xy" and other.num_keys() == 3
    assert one.compare_set("c", "", "first") == b"first" and one.compare_set("c", "", "second") == b"first"


def test_rank_0_tells_its_time(served: Served):
    before = time.perf_counter()
    told = served[1].clone().time()
    assert before <= told <= time.perf_counter()


def test_who_waits_gets_what_comes_later_or_an_error(served: Served):
    one, other = served[1], served[1].clone()
    timer = threading.Timer(0.2, lambda: other.set("late", "here"))
    timer.start()
    assert one.get("late") == b"here"
    timer.join()
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.1 s for never in the job's store"):
        one.wait(["never"], timedelta(seconds=0.1))


def test_pytorch_takes_it_as_a_store(served: Served):
    from torch.distributed import PrefixStore

    behind = PrefixStore("p", served[1])
    behind.set("a", "b")
    assert behind.get("a") == b"b" and behind.add("n", 1) == 1 and behind.check(["a"])
    assert served[1].get("p/a") == b"b" and behind.delete_key("a")


def test_another_secret_gets_in_nowhere(served: Served):
    with pytest.raises(RuntimeError, match="it is not the store of this job"):
        store.JobStore(served[0], b"guessed", TIMEOUT)
    served[1].set("still", "there")


def test_a_server_that_does_not_know_the_secret_is_not_believed():
    """Whoever listens at the address first learns nothing, and is told nothing."""
    listener = store.listen(("127.0.0.1", 0))
    server = store.Server(listener, b"another")
    with pytest.raises(RuntimeError, match="it is not the store of this job"):
        store.JobStore(listener.getsockname(), SECRET, TIMEOUT)
    del server


def test_a_proof_cannot_be_sent_back(served: Served):
    """A server's own words are no proof of a client."""
    with connected(served[0]) as stranger:
        stranger.settimeout(5)
        theirs = store._unpack(stranger.recv(64)[4:])[0]
        stranger.sendall(store._pack(theirs, store._proof(b"", b"client", theirs, theirs)))
        assert stranger.recv(64) == b""


@pytest.mark.parametrize(
    "junk",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 64, b"\x04\0\0\0\xff\0\0\0", b"", b"\x08\0\0\0set\0"],
)
def test_junk_ends_the_connection_only(served: Served, junk: bytes):
    with connected(served[0]) as stranger:
        stranger.settimeout(5)
        assert len(stranger.recv(64)) == 40
        stranger.sendall(junk)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(64) == b""
    served[1].set("still", "there")


def test_a_stranger_keeps_nothing_open(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_HANDSHAKE_SECONDS", 0.1)
    with connected(served[0]) as stranger:
        stranger.settimeout(10)
        assert len(stranger.recv(64)) == 40
        assert stranger.recv(64) == b""


def test_the_end_of_the_server_is_told():
    listener = store.listen(("127.0.0.1", 0))
    server = store.Server(listener, SECRET)
    client = store.JobStore(listener.getsockname(), SECRET, TIMEOUT)
    del server
    with pytest.raises(RuntimeError, match="Connection closed by the store of rank 0"):
        for _ in range(100):
            client.check(["a"])
            time.sleep(0.1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_who_knows_the_secret_gets_in_nowhere_on_one_host():
    name = f"weft-test-{secrets.token_hex(8)}"
    served = store.JobStore(name, SECRET, TIMEOUT, store.Server(store.listen(name), SECRET))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing but system calls: other threads may have held locks
        os.setgid(65534)
        os.setuid(65534)
        try:
            answer = connected(name).recv(64)
        except OSError:
            answer = b""
        os.write(writing, b"got %d" % len(answer))
        os._exit(0)
    assert os.read(reading, 64) == b"got 0"
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)
    served.set("still", "there")
