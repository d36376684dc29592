"""Measures the way from one host to another one: new connections on the ports of jobs, and a second of full packets.

    python -m weft.launch.doctor.stream take                     prints the ports on which it listens
    python -m weft.launch.doctor.stream send ADDRESS PORT ...    connects to each, sends for a second, says what passed

Both read a secret from the standard input first; whoever does not say it is not answered.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import random
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass

from weft.launch.discovery import PORTS
from weft.launch.interfaces import interfaces, request

SECONDS = 1.0
PATIENCE_S = 30.0
ANSWER_S = 5.0
"""A connection that is not there by then is dropped somewhere."""
USUAL_PORT = 29500
"""Where rank 0 of a job by torchrun listens, if nobody says otherwise."""
_DERIVED = 2
_BLOCK = bytes(1 << 20)
_SECRET_BYTES = 32
_PROBE, _STREAM, _WELL = b"p", b"s", b"."
_HEADERS_BYTES = 40
_TIMESTAMP_BYTES = 12
_SIOCGIFMTU = 0x8921
_TUNNELLED = 16000
"""An interface with larger packets than that leads to this host itself."""


@dataclass(frozen=True)
class Passed:
    """The part of the traffic that came through.

    Attributes:
        closed: Ports that did not answer, each with the reason.
        bytes_per_s: How fast the rest came; 0 if it did not.
        packet_bytes: The largest packets that came through; 0 where nobody can say.
        mtu_bytes: The largest that the sender's interface has.
    """

    closed: tuple[tuple[int, str], ...] = ()
    bytes_per_s: float = 0.0
    packet_bytes: int = 0
    mtu_bytes: int = 0


def listeners() -> list[socket.socket]:
    """Ports of each kind that jobs use: torchrun's, of those that follow from a job's number, and any that is free."""
    found = []
    for port in (USUAL_PORT, *random.sample(PORTS, _DERIVED), 0):
        listener = socket.socket()
        try:
            listener.bind(("", port))
            listener.listen(16)
        except OSError:  # a job listens there
            listener.close()
            continue
        found.append(listener)
    return found


def take(secret: str) -> None:
    """Answers those who know the secret, until one has sent its stream, or whoever asked for this is gone."""
    wanted = secret.encode().ljust(_SECRET_BYTES)[:_SECRET_BYTES]
    opened = listeners()
    if not opened:
        raise OSError("no process may listen here")
    print(json.dumps([listener.getsockname()[1] for listener in opened]), flush=True)
    selector = selectors.DefaultSelector()
    for listener in opened:
        selector.register(listener, selectors.EVENT_READ)
    with suppress(PermissionError):  # it is a file
        selector.register(0, selectors.EVENT_READ)
    deadline = time.monotonic() + PATIENCE_S
    while (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            if not isinstance(key.fileobj, socket.socket):
                return
            with key.fileobj.accept()[0] as connection, suppress(OSError):
                connection.settimeout(ANSWER_S)
                if not hmac.compare_digest(_exactly(connection, _SECRET_BYTES), wanted):
                    continue
                kind = _exactly(connection, 1)
                connection.sendall(_WELL)
                if kind == _STREAM:
                    connection.settimeout(PATIENCE_S)
                    connection.sendall(f"{_speed(connection)!r}\n".encode())
                    return
    raise TimeoutError(f"nobody came in {PATIENCE_S:g} s")


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (part := connection.recv(size - len(found))):
        found += part
    return found


def _speed(connection: socket.socket) -> float:
    room, taken, began = bytearray(1 << 20), 0, time.monotonic()
    while count := connection.recv_into(room):
        taken += count
    return taken / max(1e-9, time.monotonic() - began)


def send(address: str, ports: Sequence[int], secret: str) -> Passed:
    """Connects to all ports, and sends to one that answers."""
    with ThreadPoolExecutor(len(ports)) as pool:
        reasons = dict(zip(ports, pool.map(lambda port: _probe(address, port, secret), ports), strict=True))
    closed = tuple((port, reason) for port, reason in reasons.items() if reason)
    answering = [port for port, reason in reasons.items() if not reason]
    if not answering:
        return Passed(closed)
    with _connected(address, answering[-1], secret, _STREAM) as connection:
        mtu = _mtu(connection.getsockname()[0])
        connection.settimeout(2 * ANSWER_S)
        speed = 0.0
        with suppress(OSError, ValueError):  # then what is larger than a word is lost
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                connection.sendall(_BLOCK)
            connection.shutdown(socket.SHUT_WR)
            speed = float(_exactly(connection, 64))
        return Passed(closed, speed, _packet(connection) if mtu else 0, mtu)


def _connected(address: str, port: int, secret: str, kind: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), ANSWER_S)
    try:
        connection.sendall(secret.encode().ljust(_SECRET_BYTES)[:_SECRET_BYTES] + kind)
        if _exactly(connection, 1) != _WELL:
            raise OSError("somebody else answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def _probe(address: str, port: int, secret: str) -> str:
    """Why a port does not answer; empty if it does."""
    try:
        _connected(address, port, secret, _PROBE).close()
    except OSError as error:
        return str(error)
    return ""


def _packet(connection: socket.socket) -> int:
    """The size of the packets that a connection sends by now: a router on the path may have lowered it."""
    try:
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        segment, stamped = struct.unpack_from("<I", tcp_info, 16)[0], tcp_info[5] & 1
        return int(segment) + _HEADERS_BYTES + (_TIMESTAMP_BYTES if stamped else 0)
    except (AttributeError, OSError, struct.error):  # not Linux
        return 0


def _mtu(address: str) -> int:
    """The largest packet of the interface that has an address; 0 where nobody can say, or it leads to this host."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, own in interfaces():
            if own == address:
                size = struct.unpack_from("i", fcntl.ioctl(probe.fileno(), _SIOCGIFMTU, request(name)), 16)[0]
                return int(size) if size < _TUNNELLED else 0
    return 0


def main() -> None:
    what, *words = sys.argv[1:]
    secret = sys.stdin.readline().strip()
    if what == "take":
        take(secret)
    else:
        print(json.dumps(asdict(send(words[0], [int(port) for port in words[1:]], secret))))


if __name__ == "__main__":
    main()
