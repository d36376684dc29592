"""What another user of the host finds of a job: nothing to read, to write or to end."""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Running, started

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
JOB = """
import sys, time
import torch
import weft.torch as weft
weft.init({"partitions": 1})
for step in range(2000):
    weft.allgather(step)
    if step == 3 and weft.rank() == 0:
        print("ready", flush=True)
    time.sleep(0.01)
"""


def as_user(user: int, work: Callable[[], Any]) -> Any:
    """What `work` gives, as JSON, in a process of another user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.write(writing, json.dumps(work()).encode())
        except BaseException as error:
            os.write(writing, json.dumps(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def look(ranks: dict[int, int], launcher: int, folder: str) -> dict[str, list[str]]:
    """What can be read, reached and ended of a job by whoever runs this."""
    read, answered, ended = [], [], []
    for pid in [*ranks.values(), launcher]:
        for name in ("environ", "mem", "fd/0", "map_files"):
            try:
                path = Path(f"/proc/{pid}/{name}")
                _ = list(path.iterdir()) if name == "map_files" else path.open("rb").read(1)
                read.append(str(path))
            except OSError:
                pass
        for number in range(3, 64):
            try:
                os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
                read.append(f"descriptor {number} of {pid}")
            except OSError:
                pass
        try:
            os.kill(pid, 0)
            ended.append(str(pid))
        except PermissionError:
            pass
    for inside, folders, files in os.walk(folder):
        paths = [os.path.join(inside, name) for name in [*folders, *files]]
        read += [path for path in paths if os.access(path, os.R_OK) or os.access(path, os.W_OK)]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split()[-1]
        if name.startswith("@weft-"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                try:
                    connection.connect("\0" + name[1:])
                    if connection.recv(64):
                        answered.append(name)
                except OSError:
                    pass
    return {"read": read, "answered": answered, "ended": ended}


def ask_as_a_store(ports: list[int]) -> list[int]:
    """The ports that answer as a `TCPStore` of PyTorch's does when it is asked for its keys."""
    found = []
    for port in ports:
        with socket.socket() as connection:
            connection.settimeout(1)
            try:
                connection.connect(("127.0.0.1", port))
                connection.sendall(struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<B", 7))
                if connection.recv(64):
                    found.append(port)
            except OSError:
                pass
    return found


def ports_of(job: Running) -> list[int]:
    sockets = set()
    for pid in job.ranks().values():
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            sockets |= {target[8:-1]} if target.startswith("socket:[") else set()
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets]


@pytest.fixture
def shared() -> Iterator[str]:
    """A temporary folder as all users share it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        yield folder


def test_another_user_finds_nothing_to_read_to_write_or_to_end(shared: str):
    with started(2, JOB, env={"TMPDIR": shared}) as job:
        job.wait_for_line("ready")
        ranks, launcher = job.ranks(), job.process.pid
        ports = ports_of(job)
        assert ports, "gloo listens"
        assert as_user(NOBODY, lambda: look(ranks, launcher, shared)) == {
            "read": [],
            "answered": [],
            "ended": [],
        }
        assert as_user(NOBODY, lambda: ask_as_a_store(ports)) == [], "no store answers"
        own = as_user(0, lambda: look(ranks, launcher, shared))
        assert own["answered"] and own["ended"], "the same user does: the questions are the right ones"
        time.sleep(0.5)
        assert job.process.poll() is None, "the job goes on"
