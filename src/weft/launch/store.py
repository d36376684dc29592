"""The job's store: named bytes that rank 0 holds, reached only by ranks of the same job.

PyTorch's own `TCPStore` takes whoever connects: every user of a host could list its keys and write them. This one
proves both ends of a connection before a word is taken from either:

    one host        a Unix socket without a name in any folder; the system says which user is at the other end
    several hosts   a TCP connection; both ends prove that they know the job's secret, and none says it

    server  --> client   32 random bytes
    client  --> server   32 random bytes, proof                 proof: HMAC-SHA256 of both, and of who speaks
    server  --> client   proof
    client <--> server   requests and answers: a length, then parts, each with its length
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import Store

KEPT: list[JobStore] = []
"""The stores that process groups may hold, to the end of the process."""
Address = str | tuple[str, int]
"""A name of the abstract namespace of Unix sockets, without its first zero byte; or a host and a port."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HANDSHAKE_SECONDS = 10.0
_LIMIT = 1 << 30


def _pack(*parts: bytes) -> bytes:
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return _LENGTH.pack(len(body)) + body


def _unpack(body: bytes) -> list[bytes]:
    """The parts; ValueError if they are not what `_pack` makes."""
    parts, at = [], 0
    while at < len(body):
        if at + _LENGTH.size > len(body):
            raise ValueError("a part without its length")
        (size,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + size
        if at > len(body):
            raise ValueError("a part that is cut off")
        parts.append(body[at - size : at])
    return parts


def _proof(secret: bytes, who: bytes, theirs: bytes, ours: bytes) -> bytes:
    return hmac.digest(secret, who + theirs + ours, "sha256")


def _same_user(connection: socket.socket) -> bool:
    """True if the process at the other end runs as this user; for TCP the proofs say who it is."""
    if connection.family != socket.AF_UNIX:
        return True
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def listen(address: Address) -> socket.socket:
    """A socket that listens at one address only; port 0 stands for any free one.

    Raises:
        OSError: The address is taken, or not this host's.
    """
    if isinstance(address, str):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place: Any = f"\0{address}"
    else:
        listener = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place = address
    try:
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


class _Connection:
    """One client, as the server sees it; `proven`: it has shown that it belongs to the job."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.proven = False
        self.since = time.monotonic()
        self.came = bytearray()
        self.left = bytearray(_pack(self.nonce))


class Server:
    """Holds the keys, in a thread of its own, as long as somebody holds the server."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._keys = _Keys(listener, secret)
        threading.Thread(target=self._keys.serve, name="weft-store", daemon=True).start()

    def __del__(self) -> None:
        self._keys.closing = True


class _Keys:
    """The server's keys and connections, and the loop of its thread."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self.closing = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def serve(self) -> None:
        """Answers until `closing` is set."""
        while not self.closing:
            for key, _ in self._selector.select(1.0):
                if key.data is None:
                    self._accept()
                else:
                    self._attend(key.data)
            self._drop_strangers()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):
            found, _ = self._listener.accept()
            if not _same_user(found):
                found.close()
                return
            found.setblocking(False)
            if found.family != socket.AF_UNIX:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = _Connection(found)
            self._selector.register(found, selectors.EVENT_READ, client)
            self._attend(client, reads=False)

    def _drop_strangers(self) -> None:
        """Whoever does not prove that it belongs to the job keeps nothing open for long."""
        limit = time.monotonic() - _HANDSHAKE_SECONDS
        for key in list(self._selector.get_map().values()):
            if key.data is not None and not key.data.proven and key.data.since < limit:
                self._drop(key.data)

    def _drop(self, client: _Connection) -> None:
        self._selector.unregister(client.socket)
        client.socket.close()

    def _attend(self, client: _Connection, reads: bool = True) -> None:
        """Takes what came, answers it, and sends on what is left."""
        try:
            if reads:
                self._read(client)
            if client.left:
                with suppress(BlockingIOError):
                    del client.left[: client.socket.send(client.left)]
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.left else 0)
            self._selector.modify(client.socket, events, client)
        except (OSError, ValueError, IndexError):
            self._drop(client)

    def _read(self, client: _Connection) -> None:
        with suppress(BlockingIOError):
            part = client.socket.recv(1 << 16)
            if not part:
                raise ConnectionError("closed")
            client.came += part
        while len(client.came) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(client.came)
            if size > (_LIMIT if client.proven else 2 * (_LENGTH.size + _NONCE_BYTES)):
                raise ValueError("too long")
            end = _LENGTH.size + size
            if len(client.came) < end:
                return
            parts = _unpack(bytes(client.came[_LENGTH.size : end]))
            del client.came[:end]
            client.left += _pack(*(self._answer(parts) if client.proven else self._greet(client, parts)))

    def _greet(self, client: _Connection, parts: list[bytes]) -> list[bytes]:
        theirs, proof = parts
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", client.nonce, theirs)):
            raise ValueError("another job's, or nobody's")
        client.proven = True
        return [_proof(self._secret, b"server", theirs, client.nonce)]

    def _answer(self, parts: list[bytes]) -> list[bytes]:
        what, *given = parts
        values = self._values
        if what == b"set":
            values[given[0]] = given[1]
            return []
        if what == b"get":
            return [values[given[0]]] if given[0] in values else []
        if what == b"check":
            return [b"%d" % all(key in values for key in given)]
        if what == b"add":
            values[given[0]] = b"%d" % (int(values.get(given[0], b"0")) + int(given[1]))
            return [values[given[0]]]
        if what == b"append":
            values[given[0]] = values.get(given[0], b"") + given[1]
            return []
        if what == b"compare":
            key, expected, desired = given
            if values.get(key, b"") == expected:
                values[key] = desired
            return [values.get(key, expected)]
        if what == b"delete":
            return [b"%d" % (values.pop(given[0], None) is not None)]
        if what == b"count":
            return [b"%d" % len(values)]
        if what == b"time":
            return [repr(time.perf_counter()).encode()]
        raise ValueError("no such request")


class JobStore(Store):
    """One connection to the server, as a store of `torch.distributed`; `server`: kept as long as this one.

    Methods have the names under which PyTorch's C++ looks for them; some of these are not Python's. C++ cannot call
    them any more when nothing in Python refers to the store, even while it holds the store itself: so `KEPT` does.

    Raises:
        RuntimeError: The server does not answer, or is not one of this job.
    """

    def __init__(
        self, address: Address, secret: bytes, timeout: timedelta, server: Server | None = None
    ) -> None:
        super().__init__()
        self.address = address
        self._how = address, secret, timeout
        self._server = server
        self._timeout_s = timeout.total_seconds()
        self._lock = threading.Lock()
        self._socket = _connected(address, self._timeout_s)
        try:
            if not _same_user(self._socket):
                raise ValueError("its process belongs to another user")
            self._prove(secret)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise RuntimeError(f"it is not the store of this job: {error}") from error

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()

    def _prove(self, secret: bytes) -> None:
        ours = secrets.token_bytes(_NONCE_BYTES)
        (theirs,) = self._receive(_LENGTH.size + _NONCE_BYTES)
        self._socket.sendall(_pack(ours, _proof(secret, b"client", theirs, ours)))
        (proof,) = self._receive(_LENGTH.size + _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"server", ours, theirs)):
            raise ValueError("it does not know the job's secret")

    def _receive(self, limit: int = _LIMIT) -> list[bytes]:
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if size > limit:
            raise ValueError(f"an answer of {size} bytes")
        return _unpack(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                raise ConnectionError("the connection was closed")
            found += part
        return bytes(found)

    def _ask(self, what: bytes, *given: str | bytes) -> list[bytes]:
        with self._lock:
            try:
                self._socket.sendall(_pack(what, *(g.encode() if isinstance(g, str) else g for g in given)))
                return self._receive()
            except (OSError, ValueError) as error:
                self._socket.close()  # what comes next may be the rest of this answer
                raise RuntimeError(f"Connection closed by the store of rank 0: {error}") from error

    def clone(self) -> JobStore:
        """Another connection to the same keys."""
        return JobStore(*self._how, self._server)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(b"get", key)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key, b"%d" % amount)[0])

    def check(self, keys: list[str]) -> bool:
        return self._ask(b"check", *keys) == [b"1"]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(b"compare", key, expected, desired)[0]

    def deleteKey(self, key: str) -> bool:
        return self._ask(b"delete", key) == [b"1"]

    def getNumKeys(self) -> int:
        return int(self._ask(b"count")[0])

    def time(self) -> float:
        """The clock of rank 0's process in seconds (`time.perf_counter`)."""
        return float(self._ask(b"time")[0])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys are there."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline, pause = time.monotonic() + seconds, 0.001
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Timed out waiting {seconds:g} s for {', '.join(keys)} in the job's store"
                )
            time.sleep(pause)
            pause = min(0.02, pause * 1.5)


def _connected(address: Address, seconds: float) -> socket.socket:
    """A connection to a server that may not listen yet."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while True:
        try:
            if not isinstance(address, str):
                found = socket.create_connection(address, seconds)
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return found
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found.settimeout(seconds)
            try:
                found.connect(f"\0{address}")
                return found
            except OSError:
                found.close()
                raise
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise RuntimeError(str(error)) from error
        time.sleep(pause)
        pause = min(0.2, pause * 1.5)
