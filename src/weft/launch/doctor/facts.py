"""The facts of a host. ``python -m weft.launch.doctor.facts`` prints them as JSON; no framework is imported."""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import weft
from weft.document import Document
from weft.launch.interfaces import interfaces

KIND = "host's facts"
SHARED = "/dev/shm"
_GPU_SECONDS = 20


@dataclass(frozen=True)
class Facts:
    """One host's.

    Attributes:
        name: What it calls itself.
        address: What that name leads to there; empty if to nothing.
        interfaces: Its interfaces and their IPv4 addresses, without the loopback's.
        listens: Whether a process may listen there, on any port.
        python, torch, version: Versions, the last one weft's; empty for what is not installed.
        clock_s: Seconds since 1970.
        shared_bytes: Room in /dev/shm; 0 if there is none.
        open_files: How many files a process may hold open; -1 if there is no limit.
        cores: How many processor cores this process may use.
        gpus: The names of its GPUs.
    """

    name: str
    address: str
    interfaces: tuple[tuple[str, str], ...]
    listens: bool
    python: str
    torch: str
    version: str
    clock_s: float
    shared_bytes: int
    open_files: int
    cores: int
    gpus: tuple[str, ...]

    @classmethod
    def here(cls) -> Facts:
        """Those of this host."""
        name = socket.gethostname()
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(
            name=name,
            address=_address(name),
            interfaces=tuple(each for each in interfaces() if not each[1].startswith("127.")),
            listens=_listens(),
            python=platform.python_version(),
            torch=_version("torch"),
            version=weft.__version__,
            clock_s=time.time(),
            shared_bytes=_room(SHARED),
            open_files=-1 if most == resource.RLIM_INFINITY else most,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            gpus=_gpus(),
        )

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """The facts that a host printed.

        Raises:
            FormatError: It is nothing of the kind.
        """
        given = Document.parse(text, kind=KIND, version=1)["facts"]
        return cls(
            **{name: given[name].text() for name in ("name", "address", "python", "torch", "version")},
            interfaces=tuple((each["name"].text(), each["address"].text()) for each in given["interfaces"]),
            listens=bool(given["listens"].whole()),
            clock_s=given["clock_s"].number(),
            shared_bytes=given["shared_bytes"].whole(),
            open_files=int(given["open_files"].number()),
            cores=given["cores"].whole(),
            gpus=tuple(each.text() for each in given["gpus"]),
        )

    def to_json(self) -> str:
        """The facts as text that ``from_json`` reads."""
        values = {**asdict(self), "listens": int(self.listens)}
        values["interfaces"] = [{"name": name, "address": address} for name, address in self.interfaces]
        return json.dumps({"weft": KIND, "version": 1, "facts": values})


def _address(name: str) -> str:
    with suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    return ""


def _listens() -> bool:
    with suppress(OSError), socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        return True
    return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _room(folder: str) -> int:
    with suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return 0


def _gpus() -> tuple[str, ...]:
    """By the driver's own command: a framework would take seconds, and memory of each GPU."""
    with suppress(OSError, subprocess.SubprocessError):
        line = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=_GPU_SECONDS, check=False)
        if done.returncode == 0:
            return tuple(name.strip() for name in done.stdout.splitlines() if name.strip())
    return ()


if __name__ == "__main__":
    print(Facts.here().to_json())
