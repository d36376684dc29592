"""How the ranks of a job find each other: a store of weft's own, held by rank 0, behind a nonce.

    weft                rank 0 opens the store on a free port; its address goes through the launcher's memory
    torchrun            the same; the address goes through the agent's store, under run id and restart count
    mpirun, one host    the same; the address goes through a file in a private directory
    several hosts       rank 0 opens the store on the port that the launcher's variables give

On one host everything listens on the loopback interface. Everything that is stored lies under a random
prefix, so that a second job, or an earlier attempt of this one, can never be taken for it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from weft.errors import LaunchError
from weft.foreign import translated
from weft.launch.discovery import Place
from weft.runtime.heartbeat import Page
from weft.runtime.monitor import Monitor
from weft.runtime.process import die_with_parent, is_alive
from weft.transport.private_c10d import default_store

LOOPBACK = "127.0.0.1"
LET_GO_S = 0.1
"""Far more than a thread of gloo's needs to let go of what it has done."""
_SIOCGIFADDR = 0x8915
_ANY_PORT = 0
_T = TypeVar("_T")


def locate(place: Place) -> Place:
    """`place`, or that of a process group which the script itself has already made."""
    if not dist.is_initialized():
        return place
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if place.source != "single":
        if (place.rank, place.world_size) != (rank, world_size):
            raise LaunchError(
                f"the script's process group says rank {rank} of {world_size}, the variables of "
                f"{place.source} say rank {place.rank} of {place.world_size}"
            )
        return place
    store = PrefixStore("weft/hosts", default_store())
    store.set(str(rank), socket.gethostname())
    hosts = [store.get(str(other)).decode() for other in range(world_size)]
    local = [other for other in range(world_size) if hosts[other] == hosts[rank]]
    position = local.index(rank)
    return replace(place, rank=rank, world_size=world_size, local_rank=position, local_size=len(local))


def connect(place: Place, timeout: timedelta) -> Store:
    """The job's store; every rank calls this, and gets one that nobody else knows the prefix of.

    Raises:
        LaunchError: The others could not be found within `timeout`.
    """
    if place.launched:
        die_with_parent()
    if place.world_size == 1:
        return HashStore()
    deadline = time.monotonic() + timeout.total_seconds()
    if dist.is_initialized():
        return _behind_nonce(PrefixStore("weft", default_store()), place, timeout)
    if place.shared_fd is not None:
        page = Page.attach(place.shared_fd)
        return _through(_PageBox(page), place, timeout, deadline)
    if place.agent:
        return _through(_AgentBox(place, timeout), place, timeout, deadline)
    if place.one_host and place.source != "torchrun" and place.job:
        return _through(_FileBox(place), place, timeout, deadline)
    return _at_known_port(place, timeout)


class _Box(ABC):
    """A place where rank 0 leaves a text and the others find it."""

    @abstractmethod
    def put(self, text: str) -> None: ...

    @abstractmethod
    def get(self) -> str:
        """The text; empty before rank 0 left it."""

    def close(self) -> None:
        """Removes the place, when all have read or the start failed."""
        return


class _PageBox(_Box):
    def __init__(self, page: Page) -> None:
        self._page = page

    def put(self, text: str) -> None:
        self._page.leader = text

    def get(self) -> str:
        return self._page.leader

    def close(self) -> None:
        self._page.leader = ""


class _AgentBox(_Box):
    """The store of torchrun's agent; the key names the attempt."""

    def __init__(self, place: Place, timeout: timedelta) -> None:
        assert place.leader is not None and place.port is not None
        self._key = f"weft/{hashlib.sha256(place.job.encode()).hexdigest()[:32]}"
        self._store = TCPStore(place.leader, place.port, is_master=False, timeout=timeout)

    def put(self, text: str) -> None:
        self._store.set(self._key, text)

    def get(self) -> str:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""

    def close(self) -> None:
        self._store.delete_key(self._key)


class _FileBox(_Box):
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


def _through(box: _Box, place: Place, timeout: timedelta, deadline: float) -> Store:
    """Rank 0 opens a store on a free port and leaves the address in `box`."""
    try:
        if place.rank == 0:
            address, nonce = own_address(place), secrets.token_hex(16)
            server = _serve(address, _ANY_PORT, timeout)
            box.put(json.dumps({"address": address, "port": server.port, "nonce": nonce, "pid": os.getpid()}))
            store = PrefixStore(nonce, server)
        else:
            told = _wait_for(lambda: _told(box, place), deadline, place)
            store = PrefixStore(told["nonce"], _join(told["address"], told["port"], timeout))
        _all_here(store, place, deadline)
    except BaseException:
        with suppress(RuntimeError):
            box.close()
        raise
    if place.rank == 0:
        box.close()
    return store


def _told(box: _Box, place: Place) -> dict[str, Any] | None:
    """What rank 0 left; on one host only if that rank 0 still lives."""
    with translated(
        "what rank 0 left for the others cannot be read", LaunchError, "end what is left of that job"
    ):
        text = box.get()
        told = json.loads(text) if text else None
        return told if told and (not place.one_host or is_alive(told["pid"])) else None


def _at_known_port(place: Place, timeout: timedelta) -> Store:
    """Rank 0 opens the store where the variables say, and tells the nonce there."""
    if place.leader is None or place.port is None:
        raise LaunchError(
            f"{place.source} does not tell where rank 0 listens: set MASTER_ADDR and MASTER_PORT, "
            "or WEFT_LEADER=host:port, on all ranks"
        )
    if place.rank == 0:
        address = LOOPBACK if place.one_host else place.leader
        store: Store = _serve(address, place.port, timeout)
    else:
        store = _join(LOOPBACK if place.one_host else place.leader, place.port, timeout)
    key = hashlib.sha256(place.job.encode()).hexdigest()[:32]
    return _behind_nonce(PrefixStore(f"weft/{key}", store), place, timeout)


def _behind_nonce(store: Store, place: Place, timeout: timedelta) -> Store:
    if place.rank == 0:
        store.set("nonce", secrets.token_hex(16))
    deadline = time.monotonic() + timeout.total_seconds()
    _wait_for(lambda: store.check(["nonce"]) or None, deadline, place)
    secret = PrefixStore(store.get("nonce").decode(), store)
    _all_here(secret, place, deadline)
    if place.rank == 0:
        store.delete_key("nonce")
    return secret


def _all_here(store: Store, place: Place, deadline: float) -> None:
    """Waits until every rank has found the store; rank 0 names those that did not."""
    store.set(f"here/{place.rank}", "")
    if place.rank != 0:
        return
    missing = list(range(1, place.world_size))
    while missing:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing and time.monotonic() > deadline:
            came = place.world_size - len(missing)
            named = ", ".join(map(str, missing))
            raise LaunchError(f"only {came} of {place.world_size} ranks came; missing: rank {named}")
        time.sleep(0.005 if missing else 0)


def _wait_for(look: Callable[[], _T | None], deadline: float, place: Place) -> _T:
    pause = 0.002
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank {place.rank} of {place.world_size} ({place.source}) did not find rank 0 in time"
            )
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return found


def _serve(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens on one address only; torch's own would listen on all of them."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            reasons = {
                errno.EADDRINUSE: "the port is in use, perhaps by another job: choose another one",
                errno.EADDRNOTAVAIL: "rank 0 does not run on that host: say where it does",
            }
            reason = reasons.get(error.errno or 0, str(error))
            raise LaunchError(
                f"rank 0 cannot listen on {address}:{port}: {reason} with WEFT_LEADER=host:port"
            ) from error
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def _join(address: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise LaunchError(f"the store of rank 0 at {address}:{port} does not answer: {error}") from error


def own_address(place: Place) -> str:
    """The address under which this rank's peers reach it: loopback if all ranks share the host.

    Raises:
        LaunchError: The job spans hosts, but only loopback leads to the leader.
    """
    if place.one_host:
        return LOOPBACK
    assert place.leader is not None
    try:
        family, _, _, _, target = socket.getaddrinfo(place.leader, place.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(f'no way leads to "{place.leader}", the host of rank 0: {error}') from error
    if address.startswith("127.") or address == "::1":
        raise LaunchError(
            f'"{place.leader}" leads to {address} on this host, which other hosts cannot reach: set '
            "WEFT_LEADER=host:port (or MASTER_ADDR) to an address that rank 0 has on the hosts' network"
        )
    return address


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, such as `eth0`."""
    if ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def init_process_group(place: Place, store: Store, backend: str, timeout: timedelta) -> None:
    """Makes the default process group over `store`, unless the script made one."""
    if dist.is_initialized():
        return
    choose_interface(place)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )


def choose_interface(place: Place) -> None:
    """gloo takes its interface from a variable, and from what the host's name resolves to if that is not set; so it is
    set here, for all groups that are made later."""
    interface = interface_of(own_address(place)) if place.world_size > 1 else interface_of(LOOPBACK)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def shutdown(monitor: Monitor) -> None:
    """A normal end: wait for all ranks, take the process groups down, leave. Register it with `atexit`.

    Without the wait, a process that ends first takes the connections of the others with it; without
    taking the groups down, their destructors abort the process now and then.
    """
    if monitor.finish() and dist.is_initialized():
        dist.destroy_process_group()
    monitor.leave()


def let_go() -> None:
    """At the end of a process that does not take its groups down: gives gloo's threads a moment with the interpreter's
    lock.

    What a thread has done holds its tensors a little longer than others wait for it. One that lets go of a tensor after
    the interpreter's end has begun aborts the process.
    """
    if dist.is_initialized():
        time.sleep(LET_GO_S)
