"""How fast one host sends to another one: a listener there, a sender here.

    python -m weft.launch.doctor.stream take                 prints its port, then what it took
    python -m weft.launch.doctor.stream send ADDRESS PORT    sends for a second

Both read a secret from the standard input first; whoever does not say it is not taken.
"""

from __future__ import annotations

import hmac
import socket
import sys
import time
from contextlib import suppress

SECONDS = 1.0
PATIENCE_S = 30.0
_BLOCK = bytes(1 << 20)
_SECRET_BYTES = 32


def take(secret: str) -> float:
    """Bytes per second that the one who knows the secret sends; its port is printed before."""
    wanted = secret.encode().ljust(_SECRET_BYTES)[:_SECRET_BYTES]
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(4)
        print(listener.getsockname()[1], flush=True)
        deadline = time.monotonic() + PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with listener.accept()[0] as connection:
                connection.settimeout(PATIENCE_S)
                with suppress(OSError):
                    if hmac.compare_digest(_exactly(connection, _SECRET_BYTES), wanted):
                        return _speed(connection)
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


def send(address: str, port: int, secret: str) -> None:
    """Sends for a second.

    Raises:
        OSError: Nobody answers there.
    """
    with socket.create_connection((address, port), PATIENCE_S / 3) as connection:
        connection.sendall(secret.encode().ljust(_SECRET_BYTES)[:_SECRET_BYTES])
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            connection.sendall(_BLOCK)


def main() -> None:
    what, *words = sys.argv[1:]
    secret = sys.stdin.readline().strip()
    if what == "take":
        print(take(secret), flush=True)
    else:
        send(words[0], int(words[1]), secret)


if __name__ == "__main__":
    main()
