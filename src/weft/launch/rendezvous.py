"""The rendezvous of a job's ranks: a store of weft's own (`weft.launch.store`), held by rank 0.

    weft                rank 0 opens the store; its address goes through the launcher's memory, on several hosts too
    torchrun            the same; the address goes through the agent's store, under run id and restart count
    mpirun, one host    the same; the address goes through a file in a private directory
    several hosts       rank 0 opens the store on the port that the launcher's variables give; so where it is not given
                        who shares a host

On one host only processes of the same user get in. Over several hosts a connection proves that it knows a secret: made
from the job's token where there is one, else from a random number that goes with the address. So a second job, an
earlier attempt of this one, or a stranger can never be taken for it.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from weft.errors import LaunchError
from weft.launch.bootstrap_store import AgentBox, Box, FileBox, PageBox, ScriptBox, closed_at_sigterm
from weft.launch.discovery import Place
from weft.launch.interfaces import interfaces
from weft.launch.siblings import FrozenSibling, Siblings
from weft.launch.store import KEPT, Address, JobStore, Server, listen
from weft.transport.private_c10d import default_store
from weft.untrusted import translated
from weft.watch.heartbeat import Page
from weft.watch.monitor import Limits, Monitor
from weft.watch.process import die_with_parent, is_alive, launcher_left
from weft.watch.sidecar.start import Beside

log = logging.getLogger("weft")

LOOPBACK = "127.0.0.1"
LET_GO_S = 0.1
"""Far more than a thread of gloo's needs to let go of what it has done."""
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
        if place.local_size:
            return place
    return _with_hosts(replace(place, rank=rank, world_size=world_size), default_store())


def _with_hosts(place: Place, store: Store) -> Place:
    """`place` with its numbers on its host, which the ranks of a host find out by its name; every rank calls this."""
    names = PrefixStore("weft/hosts", store)
    names.set(str(place.rank), socket.gethostname())
    hosts = [names.get(str(other)) for other in range(place.world_size)]
    local = [other for other, host in enumerate(hosts) if host == hosts[place.rank]]
    return replace(place, local_rank=local.index(place.rank), local_size=len(local))


def connect(place: Place, timeout: timedelta, frozen_s: float | None = None) -> Store:
    """The job's store; every rank calls this, and gets one that nobody else knows the prefix of.

    ``frozen_s``: a rank of this host that is stopped for so long, before it comes here, ends the job.

    Raises:
        LaunchError: The others could not be found within `timeout`.
    """
    if place.launched:
        die_with_parent()
        if launcher_left(os.environ):
            raise LaunchError(
                "the launcher of this rank (mpirun, srun) ended before the script came to weft.init: so does the rank"
            )
    if place.world_size == 1:
        return HashStore()
    deadline, siblings = time.monotonic() + timeout.total_seconds(), Siblings(place, frozen_s)
    if dist.is_initialized():
        if place.one_host:
            return _through(ScriptBox(), place, timeout, deadline, siblings)
        return _of_script(place, timeout, siblings)
    if place.shared_fd is not None:
        page = Page.attach(place.shared_fd)
        return _through(PageBox(page), place, timeout, deadline, siblings)
    if place.agent:
        return _through(AgentBox(place, timeout), place, timeout, deadline, siblings)
    if place.one_host and place.source != "torchrun" and place.job:
        box = FileBox(place)
        with closed_at_sigterm(box):
            return _through(box, place, timeout, deadline, siblings)
    return _at_known_port(place, timeout, siblings)


def enter(place: Place, limits: Limits, timeout: timedelta) -> tuple[Place, Store, Monitor]:
    """The place as it is known then, the job's store, and this rank's watch, which ends with the script.

    Where a launcher shares memory with its ranks the watch begins first, so that waiting for the others is judged too.

    Raises:
        LaunchError: As `connect`.
    """
    monitor = None if place.shared_fd is None else Monitor.start(place, limits)
    if monitor is not None:
        monitor.note("wait", module="weft.init")
        atexit.register(shutdown, monitor)
    try:
        store = connect(place, timeout, limits.heartbeat)
    except FrozenSibling as frozen:
        frozen.end(place.rank)
    if not place.local_size:
        place = _with_hosts(place, store)
    if monitor is None:
        monitor = Monitor.start(place, limits, store)
        monitor.beside = None if place.one_host else _beside(place, store, limits)
        monitor.note("wait", module="weft.init")
        atexit.register(shutdown, monitor)
    else:
        monitor.hold(store)
    return place, store, monitor


def _beside(place: Place, store: Store, limits: Limits) -> Beside:
    """The process beside this one, where there is more than one host."""
    port = store.address[1] if isinstance(store, JobStore) and not isinstance(store.address, str) else 0
    return Beside(place.source == "openmpi", port, limits.heartbeat)


def _through(box: Box, place: Place, timeout: timedelta, deadline: float, siblings: Siblings) -> Store:
    """Rank 0 opens a store at a free address and leaves the address in `box`."""
    try:
        if place.rank == 0:
            nonce = secrets.token_hex(16)
            own = f"weft-{nonce}" if place.one_host else (own_address(place), _ANY_PORT)
            store = _serve(own, place, nonce, timeout)
            box.put(json.dumps({"address": store.address, "nonce": nonce, "pid": os.getpid()}))
        else:
            leader = _wait_for(lambda: _address_in(box, place), deadline, place, siblings)
            store = _join(leader["address"], place, leader["nonce"], timeout)
        _all_here(store, place, deadline, siblings)
    except BaseException:
        with suppress(RuntimeError):
            box.close()
        raise
    if place.rank == 0:
        box.close()
    return store


def _address_in(box: Box, place: Place) -> dict[str, Any] | None:
    """The address that rank 0 left; on one host only if that rank 0 still lives.

    Others may have written it: nothing of it is believed before the store has proved itself.

    Raises:
        LaunchError: It is not what rank 0 writes.
    """
    text = box.get()
    if not text:
        return None
    what = f"rank {place.rank} read an address of rank 0 that weft did not write"
    with translated(what, LaunchError, "something else writes there"):
        found = json.loads(text)
        address, nonce, pid = found["address"], found["nonce"], found["pid"]
        if place.one_host:
            known = isinstance(address, str) and address.startswith("weft-")
        else:
            host, port = address
            known = isinstance(host, str) and isinstance(port, int) and 0 < port < 65536
            found["address"] = (host, port)
        if not known or not isinstance(nonce, str) or not isinstance(pid, int):
            raise ValueError(f"they are {text[:80]!r}")
    return found if not place.one_host or is_alive(pid) else None


def _at_known_port(place: Place, timeout: timedelta, siblings: Siblings) -> Store:
    """Rank 0 opens the store where the variables say, and leaves the nonce in it."""
    if place.leader is None or place.port is None:
        raise LaunchError(
            f"{place.source} does not say where rank 0 listens: set MASTER_ADDR and MASTER_PORT, "
            "or WEFT_LEADER=host:port, on all ranks"
        )
    key = hashlib.sha256(f"{place.job} {place.port}".encode()).hexdigest()[:32]
    address = f"weft-{os.getuid()}-{key}" if place.one_host else (place.leader, place.port)
    deadline = time.monotonic() + timeout.total_seconds()
    store = (_serve if place.rank == 0 else _join)(address, place, key, timeout)
    _all_here(store, place, deadline, siblings)
    return store


def _of_script(place: Place, timeout: timedelta, siblings: Siblings) -> Store:
    """The store of the process group that a script has made itself, where it says nothing of the hosts' addresses."""
    store = PrefixStore("weft", default_store())
    if place.rank == 0:
        store.set("nonce", secrets.token_hex(16))
    deadline = time.monotonic() + timeout.total_seconds()
    _wait_for(lambda: store.check(["nonce"]) or None, deadline, place, siblings)
    own = PrefixStore(store.get("nonce").decode(), store)
    _all_here(own, place, deadline, siblings)
    if place.rank == 0:
        store.delete_key("nonce")
    return own


def _all_here(store: Store, place: Place, deadline: float, siblings: Siblings) -> None:
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
        siblings.look()
        time.sleep(0.005 if missing else 0)


def _wait_for(look: Callable[[], _T | None], deadline: float, place: Place, siblings: Siblings) -> _T:
    pause = 0.002
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank {place.rank} of {place.world_size} ({place.source}) did not find rank 0 in time"
            )
        siblings.look()
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return found


def _kept(store: JobStore) -> JobStore:
    KEPT.append(store)
    return store


def _secret(place: Place, nonce: str) -> bytes:
    """The secret that both ends of a connection have to know."""
    return hashlib.sha256(f"{place.token}:{nonce}".encode()).digest()


def _serve(address: Address, place: Place, nonce: str, timeout: timedelta) -> JobStore:
    """The store itself, and rank 0's own connection to it."""
    try:
        listener = listen(address)
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: "the port is in use, perhaps by another job: choose another one",
            errno.EADDRNOTAVAIL: "rank 0 does not run on that host: say where it does",
        }
        reason = reasons.get(error.errno or 0, str(error))
        shown = f"port {place.port}" if isinstance(address, str) else f"{address[0]}:{address[1]}"
        raise LaunchError(f"rank 0 cannot listen on {shown}: {reason} with WEFT_LEADER=host:port") from error
    if not place.one_host and not place.token:
        log.warning(
            "the job %s hosts and has no token: whoever reaches %s and learns the job's name can join it; set "
            "WEFT_TOKEN to the same secret text on all hosts", "spans" if place.local_size else "may span", address[0],
        )  # fmt: skip
    if not isinstance(address, str):
        address = (address[0], listener.getsockname()[1])
    secret = _secret(place, nonce)
    return _kept(JobStore(address, secret, timeout, Server(listener, secret)))


def _join(address: Address, place: Place, nonce: str, timeout: timedelta) -> JobStore:
    try:
        return _kept(JobStore(address, _secret(place, nonce), timeout))
    except RuntimeError as error:
        shown = f"port {place.port}" if isinstance(address, str) else f"{address[0]}:{address[1]}"
        raise LaunchError(f"the store of rank 0 at {shown} does not answer: {error}") from error


def own_address(place: Place) -> str:
    """The address under which this rank's peers reach it: loopback if all ranks share the host.

    Raises:
        LaunchError: The job spans hosts, but only loopback leads to the leader, and no launcher of weft's has said that
            all of them can be reached so.
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
    if place.source != "weft" and (address.startswith("127.") or address == "::1"):
        raise LaunchError(
            f'"{place.leader}" leads to {address} on this host, which other hosts cannot reach: set '
            "WEFT_LEADER=host:port (or MASTER_ADDR) to an address that rank 0 has on the hosts' network"
        )
    return address


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, such as `eth0`."""
    return None if ":" in address else next((name for name, own in interfaces() if own == address), None)


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
