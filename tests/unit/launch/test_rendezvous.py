"""How ranks find each other's store; threads stand for processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from weft.errors import LaunchError
from weft.launch.discovery import Place

boxes = pytest.importorskip("weft.launch.bootstrap_store", exc_type=ImportError)
rendezvous = pytest.importorskip("weft.launch.rendezvous", exc_type=ImportError)

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)


def connect_all(places: list[Place], timeout: timedelta = LONG) -> dict[int, Any]:
    """The store of each rank, or what it raised."""
    found: dict[int, Any] = {}

    def one(place: Place) -> None:
        try:
            found[place.rank] = rendezvous.connect(place, timeout)
        except LaunchError as error:
            found[place.rank] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return found


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rendezvous, "die_with_parent", lambda: None)
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_single_process_has_a_store_of_its_own():
    store = rendezvous.connect(Place(), LONG)
    store.set("a", "b")
    assert store.get("a") == b"b"


def test_ranks_of_one_host_meet_through_a_private_file(temporary: Path):
    found = connect_all([Place(rank, 3, rank, 3, "openmpi", job="1") for rank in range(3)])
    found[0].set("a", "b")
    assert [found[rank].get("a") for rank in range(3)] == [b"b"] * 3
    assert list(temporary.iterdir()) == []


def test_two_jobs_do_not_meet(temporary: Path):
    places = [Place(rank, 2, rank, 2, "openmpi", job="1") for rank in range(2)]
    one, other = connect_all(places), connect_all(places)
    one[0].set("a", "b")
    assert other[0].check(["a"]) is False


def test_a_missing_rank_is_named_and_nothing_is_left(temporary: Path):
    found = connect_all([Place(0, 3, 0, 3, "openmpi", job="1")], SHORT)
    assert str(found[0]) == "only 1 of 3 ranks came; missing: rank 1, 2"
    assert list(temporary.iterdir()) == []


def test_a_missing_rank_0_is_told_and_nothing_is_left(temporary: Path):
    found = connect_all([Place(1, 2, 1, 2, "openmpi", job="1")], SHORT)
    assert str(found[1]) == "rank 1 of 2 (openmpi) did not find rank 0 in time"
    assert list(temporary.iterdir()) == []


def test_the_word_of_a_dead_rank_0_is_not_taken(temporary: Path):
    place = Place(1, 2, 1, 2, "openmpi", job="1")
    box = boxes.FileBox(place)
    box.put('{"address": "weft-x", "nonce": "x", "pid": 999999999}')
    found = connect_all([place], SHORT)
    assert "did not find rank 0" in str(found[1])


def test_the_file_is_private(temporary: Path):
    box = boxes.FileBox(Place(0, 2, 0, 2, "openmpi", job="1"))
    box.put("{}")
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "leader.json").stat().st_mode & 0o777 == 0o600
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match="is not a private directory of this user"):
        boxes.FileBox(Place(1, 2, 1, 2, "openmpi", job="1"))


def test_the_file_goes_with_a_rank_that_is_told_to_end_while_it_waits(temporary: Path):
    pid = os.fork()
    if pid == 0:
        rendezvous.connect(Place(0, 2, 0, 2, "openmpi", job="1"), LONG)
        os._exit(0)
    deadline = time.monotonic() + 30
    while not list(temporary.glob("*/leader.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert list(temporary.iterdir()) == []


def test_a_link_instead_of_the_directory_is_refused(temporary: Path):
    place = Place(0, 2, 0, 2, "openmpi", job="1")
    boxes.FileBox(place)
    (folder,) = temporary.iterdir()
    folder.rmdir()
    (temporary / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(temporary / "elsewhere")
    with pytest.raises(LaunchError, match="is not a private directory"):
        boxes.FileBox(place)


def test_ranks_meet_at_a_known_port():
    port = free_port()
    places = [Place(rank, 2, rank, 2, "torchrun", "localhost", port, job="1") for rank in range(2)]
    found = connect_all(places)
    found[1].set("a", "b")
    assert found[0].get("a") == b"b"


def test_a_port_in_use_is_told():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        place = Place(0, 2, 0, 1, "torchrun", "127.0.0.1", port, job="1")
        with pytest.raises(LaunchError, match=rf"cannot listen on 127.0.0.1:{port}: the port is in use"):
            rendezvous.connect(place, SHORT)


def test_a_second_job_at_the_port_of_a_first_is_told():
    places = [Place(rank, 2, rank, 2, "torchrun", "localhost", free_port(), job="1") for rank in range(2)]
    found = connect_all([replace(place, port=places[0].port) for place in places])
    with pytest.raises(LaunchError, match="the port is in use, perhaps by another job"):
        rendezvous.connect(places[0], SHORT)
    del found


def test_an_address_of_another_host_is_told():
    place = Place(0, 2, 0, 1, "slurm", "192.0.2.77", free_port())
    with pytest.raises(
        LaunchError, match="rank 0 does not run on that host: say where it does with WEFT_LEADER"
    ):
        rendezvous.connect(place, SHORT)


def test_unknown_leaders_are_told():
    with pytest.raises(LaunchError, match="torchrun does not say where rank 0 listens: set MASTER_ADDR"):
        rendezvous.connect(Place(0, 2, 0, 2, "torchrun"), SHORT)


def test_nobody_listens():
    place = Place(1, 2, 1, 2, "torchrun", "localhost", free_port(), job="1")
    with pytest.raises(LaunchError, match="the store of rank 0 at port .* does not answer"):
        rendezvous.connect(place, SHORT)


def test_an_agent_that_ended_is_told_at_once(temporary: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boxes, "AGENT_SECONDS", 0.2)
    port = free_port()
    place = Place(1, 2, 1, 2, "torchrun", "127.0.0.1", port, "job", agent=True)
    with pytest.raises(
        LaunchError, match=rf"agent, .* does not listen at 127.0.0.1:{port} any more: it ended"
    ):
        rendezvous.connect(place, LONG)


def test_loopback_is_refused_where_ranks_span_hosts():
    with pytest.raises(
        LaunchError, match=r'"localhost" leads to .* which other hosts cannot reach: set WEFT_LEADER'
    ):
        rendezvous.own_address(Place(1, 2, 0, 1, "slurm", "localhost", 20000))
    assert rendezvous.own_address(Place(1, 2, 1, 2, "slurm", "elsewhere", 20000)) == "127.0.0.1"
    with pytest.raises(LaunchError, match='no way leads to "no.such.host.invalid"'):
        rendezvous.own_address(Place(1, 2, 0, 1, "slurm", "no.such.host.invalid", 20000))


def test_the_interface_of_an_address():
    name = rendezvous.interface_of("127.0.0.1")
    assert name in {name for _, name in socket.if_nameindex()}
    assert rendezvous.interface_of("203.0.113.9") is None
    assert rendezvous.interface_of("::1") is None


def test_a_group_that_the_script_made_is_used(monkeypatch: pytest.MonkeyPatch):
    dist = rendezvous.dist
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert rendezvous.locate(Place()) == Place()
        with pytest.raises(
            LaunchError, match="process group says rank 0 of 1, the variables of openmpi say rank 1 of 2"
        ):
            rendezvous.locate(Place(1, 2, 1, 2, "openmpi"))
        rendezvous.init_process_group(Place(), dist.HashStore(), "gloo", LONG)
    finally:
        dist.destroy_process_group()
    assert rendezvous.locate(Place()) == Place()


def on_two_hosts(*tokens: str) -> dict[int, Any]:
    """What two ranks of two hosts find that have these tokens; one interface stands for the network."""
    port = free_port()
    places = [
        Place(rank, 2, 0, 1, "slurm", "127.0.0.1", port, job="1", token=token)
        for rank, token in enumerate(tokens)
    ]
    return connect_all(places, timedelta(seconds=3))


def test_hosts_with_the_same_token_meet(caplog: pytest.LogCaptureFixture):
    found = on_two_hosts("secret", "secret")
    found[1].set("a", "b")
    assert found[0].get("a") == b"b" and caplog.text == ""


def test_a_host_with_another_token_is_refused():
    found = on_two_hosts("secret", "guess")
    assert "does not answer: it is not the store of this job" in str(found[1])
    assert str(found[0]) == "only 1 of 2 ranks came; missing: rank 1"


def test_hosts_without_a_token_are_warned(caplog: pytest.LogCaptureFixture):
    found = on_two_hosts("", "")
    found[1].set("a", "b")
    assert "set WEFT_TOKEN to the same secret text on all hosts" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "no JSON", "[]", '{"address": 7, "nonce": "x", "pid": 1}', '{"address": "/tmp/x", "nonce": "x", "pid": 1}',
        '{"address": ["127.0.0.1", 1], "nonce": "x", "pid": 1}', '{"address": "weft-x", "nonce": 7, "pid": 1}',
        '{"address": "weft-x", "nonce": "x"}',
    ],
)  # fmt: skip
def test_words_that_are_not_rank_0s_are_refused(temporary: Path, text: str):
    place = Place(1, 2, 1, 2, "openmpi", job="1")
    boxes.FileBox(place).put(text)
    with pytest.raises(LaunchError, match=r"that weft did not write \(.+\); something else writes there"):
        rendezvous.connect(place, SHORT)
