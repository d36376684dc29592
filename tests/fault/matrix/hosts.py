"""Two hosts on this machine: two network namespaces with a link between them, which can be cut. Linux, as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

DEVICE = "link0"
ADDRESSES = ("10.77.1.1", "10.77.1.2")
SLOW = ("rate", "20mbit", "burst", "64kb", "latency", "200ms")


def why_not() -> str:
    """Why this machine can have no such hosts; empty if it can."""
    if os.getuid() != 0:
        return "only root can make network namespaces"
    missing = [name for name in ("ip", "tc", "iptables") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return (
        ""
        if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
        else "no namespaces"
    )


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Both, and the link between them."""

    def __init__(self) -> None:
        self.names = [f"weft{os.getpid()}{end}" for end in "ab"]

    def on(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command there, under a host name of its own."""
        elsewhere = [sys.executable, "-m", "tests.planted.elsewhere", f"host{host}", "0"]
        return ["ip", "netns", "exec", self.names[host], *elsewhere, *command]

    def cut(self) -> None:
        _do("ip", "-n", self.names[1], "link", "set", DEVICE, "down")

    def mend(self) -> None:
        _do("ip", "-n", self.names[1], "link", "set", DEVICE, "up")

    def drop_one_way(self) -> None:
        """What the second host sends is lost."""
        table = ["iptables", "-w", "-A", "OUTPUT", "-o", DEVICE, "-j", "DROP"]
        _do("ip", "netns", "exec", self.names[1], *table)

    def slow_down(self) -> None:
        for name in self.names:
            _do("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *SLOW)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, gone at the end."""
    hosts = Hosts()
    made = []
    try:
        for name in hosts.names:
            _do("ip", "netns", "add", name)
            made.append(name)
        links = [f"wf{os.getpid()}{end}" for end in "ab"]
        ends = [["name", link, "netns", name] for link, name in zip(links, hosts.names, strict=True)]
        _do("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, link, address in zip(hosts.names, links, ADDRESSES, strict=True):
            _do("ip", "-n", name, "link", "set", link, "name", DEVICE)
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _do("ip", "-n", name, "link", "set", DEVICE, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in made:
            _do("ip", "netns", "del", name)
