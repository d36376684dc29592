"""Questions about processes to the operating system. Linux has all of it; elsewhere it does less."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from weft.terminal_text import visible

_PR_SET_PDEATHSIG = 1
_PMIX = tuple(f"PMIX_SERVER_URI{version}" for version in ("41", "4", "3", "21", "2"))


class _Origin:
    """Whose child this process is, noted when weft is imported: a launcher may end before a script joins its job."""

    parent = os.getppid()

    @classmethod
    def note(cls) -> None:
        cls.parent = os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Origin.note)


def stack_signal() -> int:
    """The signal at which a rank writes the Python stacks of its threads to its standard error."""
    return int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)


def answer_with_stacks() -> None:
    """Write all stacks at `stack_signal`, even while the interpreter is locked."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.register(stack_signal(), file=2, all_threads=True)


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Get the signal `number` as soon as the parent process is gone, however it went.

    `parent` is its expected id; by default that of the process that was it when weft was imported.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != (_Origin.parent if parent is None else parent):
        os._exit(1)


def launcher_left(environ: Mapping[str, str]) -> bool:
    """True if the launcher of this process is gone: nobody listens where PMIx, through which Open MPI and Slurm serve
    the ranks of a host, says that it does. False where the environment has nothing of PMIx.

    A launcher may be killed before the script imports weft, so that :func:`die_with_parent` never knew it.
    """
    found = (re.search(r"tcp4://(127\.\d+\.\d+\.\d+):(\d{1,5})", environ.get(name, "")) for name in _PMIX)
    address = next((match.groups() for match in found if match is not None), None)
    if address is None or int(address[1]) > 0xFFFF:
        return False
    try:
        socket.create_connection((address[0], int(address[1])), 1.0).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _stat(pid: int) -> list[bytes]:
    """Linux's facts of a process after its name, first the letter for what it does."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def host_name() -> str:
    """This host's name, as it may be shown."""
    return visible(socket.gethostname())


def is_stopped(pid: int) -> bool:
    """True if a process of this host stands still because of a signal or a debugger; False where nobody can say."""
    try:
        return _stat(pid)[0] in (b"T", b"t")
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """True if a process of this host still runs; one that ended and was not waited for does not."""
    try:
        return _stat(pid)[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return False
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def exit_now(code: int) -> NoReturn:
    """End this process without waiting for threads or destructors, with everything written out."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def began(pid: int) -> int | None:
    """When a process of this host began, in ticks since the host's own start; None where nobody can say.

    Two processes that had the same number one after the other do not share it.
    """
    try:
        return int(_stat(pid)[19])
    except (OSError, IndexError, ValueError):
        return None


def boot() -> str:
    """The identity of this start of the host; empty where nobody can say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def handled_in(thread: threading.Thread) -> BaseException | None:
    """The exception that code of a thread handles now, in an ``except`` or a ``finally``; None if there is none."""
    found: Any = sys._current_exceptions().get(thread.ident or 0)
    return found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
