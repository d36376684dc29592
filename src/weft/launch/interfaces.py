"""The network interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915


def request(name: str) -> bytes:
    """The argument of `ioctl` that names an interface."""
    return struct.pack("256s", name.encode()[:15])


def interfaces() -> list[tuple[str, str]]:
    """The names of the interfaces, such as `eth0`, with their IPv4 addresses; those that have none are left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request(name))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found
