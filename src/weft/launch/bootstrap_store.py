"""Where rank 0 leaves a text, and the other ranks find it before they have a store: one box for each launcher.

Only a page and a file are private. What comes out of the others may have been written by anybody.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import socket
import stat
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from weft.errors import LaunchError
from weft.launch.discovery import Place
from weft.transport.private_c10d import default_store
from weft.watch.heartbeat import Page
from weft.watch.process import die_with_parent

AGENT_SECONDS = 3.0
"""How long ranks knock at the store of an agent that refuses them."""


class Box(ABC):
    """A place where rank 0 leaves a text and the others find it."""

    @abstractmethod
    def put(self, text: str) -> None: ...

    @abstractmethod
    def get(self) -> str:
        """The text; empty before rank 0 left it."""

    def close(self) -> None:
        """Removes the place, when all have read or the start failed."""
        return


class PageBox(Box):
    def __init__(self, page: Page) -> None:
        self._page = page

    def put(self, text: str) -> None:
        self._page.leader = text

    def get(self) -> str:
        return self._page.leader

    def close(self) -> None:
        self._page.leader = ""


class AgentBox(Box):
    """The store of torchrun's agent; the key names the attempt."""

    def __init__(self, place: Place, timeout: timedelta) -> None:
        assert place.leader is not None and place.port is not None
        self._key = f"weft/{hashlib.sha256(place.job.encode()).hexdigest()[:32]}"
        _expect_agent(place.leader, place.port)
        self._store = TCPStore(place.leader, place.port, is_master=False, timeout=timeout)

    def put(self, text: str) -> None:
        self._store.set(self._key, text)

    def get(self) -> str:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""

    def close(self) -> None:
        self._store.delete_key(self._key)


def _expect_agent(host: str, port: int) -> None:
    """The agent's store was there before any rank was; PyTorch would knock for as long as its time-out is.

    Raises:
        LaunchError: Nobody listens there any more.
    """
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            socket.create_connection((host, port), AGENT_SECONDS).close()
            return
        except ConnectionRefusedError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"torchrun's agent, which started this rank, does not listen at {host}:{port} any more: it ended"
                ) from error
            time.sleep(0.1)
        except OSError:
            return  # a network in trouble: the store's own time-out is for that


class ScriptBox(Box):
    """The store of a process group that the script has made."""

    def __init__(self) -> None:
        self._store = PrefixStore("weft", default_store())

    def put(self, text: str) -> None:
        self._store.set("leader", text)

    def get(self) -> str:
        return self._store.get("leader").decode() if self._store.check(["leader"]) else ""

    def close(self) -> None:
        self._store.delete_key("leader")


class FileBox(Box):
    """A file that only this user can read, for ranks of one host whose launcher offers nothing better."""

    def __init__(self, place: Place) -> None:
        job = f"{place.source}:{place.job}:{os.getppid() if place.source == 'mpich' else ''}"
        name = f"weft-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:24]}"
        self._folder = Path(tempfile.gettempdir()) / name
        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise LaunchError(f"{self._folder} is not a private directory of this user: remove it")
        self._file = self._folder / "leader.json"

    def put(self, text: str) -> None:
        new = self._folder / f"{secrets.token_hex(8)}.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        new.replace(self._file)

    def get(self) -> str:
        try:
            return self._file.read_text()
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
            self._folder.rmdir()


@contextmanager
def closed_at_sigterm(box: Box) -> Iterator[None]:
    """Closes the box also if this process is asked to end inside, or its launcher is gone.

    A launcher does that as soon as another rank died. A script that has a handler of its own keeps it.
    """

    def end(number: int, _: object) -> None:
        box.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    mine = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if mine:
        signal.signal(signal.SIGTERM, end)
        die_with_parent(number=signal.SIGTERM)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent()
