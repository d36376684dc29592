"""Hosts as the launcher sees them; small programs stand for ssh and the agent behind it."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Sequence
from contextlib import closing

import pytest

import weft
from weft.errors import LaunchError
from weft.launch.remote.ssh_hosts import Elsewhere
from weft.launch.running.job import Host, Job
from weft.watch.heartbeat import Page

HELLO = (
    "import sys, time\nfrom weft.launch.remote.wire import MARK, packed\n"
    "hello = {{'kind': 'hello', 'host': {host!r}, 'address': {address!r}, 'time': 0.0, 'weft': {version!r}}}\n"
    "sys.stdout.buffer.write(b'Welcome\\x1b[2J\\n' + MARK + packed(hello))\nsys.stdout.flush()\nsys.stdin.read()\n"
)


def program(address: str = "10.0.0.1", version: str = weft.__version__, host: str = "node") -> str:
    return HELLO.format(address=address, version=version, host=host)


def lost(programs: Sequence[str]) -> tuple[str, bytes]:
    """Why a host is lost that these programs stand for, and what is shown of no rank."""
    said: list[bytes] = []
    hosts = [Host(f"node{n}", [sys.executable, "-c", text]) for n, text in enumerate(programs)]
    page, _ = Page.create(2 * len(hosts))
    job = Job(["train.py"], 2 * len(hosts), {}, hosts=hosts)
    with selectors.DefaultSelector() as selector:
        there = Elsewhere(job, page, {}, selector, lambda *_: None, said.append)
        with closing(there):
            deadline = time.monotonic() + 60
            while there.lost is None and time.monotonic() < deadline:
                for key, _ in selector.select(0.05):
                    key.data()
                there.exchange()
            assert there.lost is not None and there.gone
            assert all(rank in there.lost.ranks and code == -9 for rank, code in there.ends())
            return there.lost.text, b"".join(said)


def test_another_version():
    text, said = lost([program(), program(version="0.0")])
    assert text == (
        f"node1 (ranks 2 to 3) did not start its ranks: it has weft 0.0 and this host {weft.__version__}: install the "
        "same on both"
    )
    assert b"[node1] Welcome\\x1b[2J\n" in said


def test_the_first_host_by_its_loopback():
    text, _ = lost([program("127.0.1.1"), program("10.0.0.2")])
    assert (
        "ssh reached it at 127.0.1.1, where other hosts cannot: name it by an address on the hosts' network"
        in text
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import sys\nsys.exit('Permission\\x1b denied (publickey).')",
            "by ssh: Permission\\x1b denied (publickey).",
        ),
        ("raise SystemExit(7)", "by ssh: ssh ended with exit code 7"),
        ("print('x' * 100_000)", "by ssh: it says something else than weft's agent does"),
        (f"{program()}\n".replace("packed(hello)", "packed(hello) + b'{' * 99"), "what it says is damaged"),
    ],
)
def test_who_is_no_agent(source: str, why: str):
    text, _ = lost([source])
    assert text.startswith("node0 (ranks 0 to 1) ") and why in text


def test_no_ssh():
    job = Job(["train.py"], 1, {}, hosts=[Host("node0", ["no-such-ssh"])])
    page, _ = Page.create(1)
    with (
        selectors.DefaultSelector() as selector,
        pytest.raises(LaunchError, match="no-such-ssh cannot be started: "),
    ):
        Elsewhere(job, page, {}, selector, lambda *_: None, lambda line: None)
