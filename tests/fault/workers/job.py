"""A job that does nothing but steps, and one fault at one place.

Without `--collective` no framework is needed: a rank then waits for the others by looking at their signs.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from weft.errors import DivergenceError
from weft.launch.discovery import Place, discover
from weft.launch.startup import agree
from weft.watch.heartbeat import Page, State
from weft.watch.monitor import Limits, Monitor


def raise_error() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("injected \x1b[31mfault") from error


def stop(resume_after: float | None = None) -> None:
    if resume_after is not None:
        subprocess.Popen(["sh", "-c", f"sleep {resume_after}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def segfault() -> None:
    ctypes.string_at(0)


def hold_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


FAULTS: dict[str, Callable[[], object]] = {
    "exception": raise_error,
    "exit3": lambda: os._exit(3),
    "vanish": lambda: os._exit(0),
    "sys.exit3": lambda: sys.exit(3),
    "leave": lambda: sys.exit(0),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": segfault,
    "stop": stop,
    "pause": lambda: stop(resume_after=1.0),
    "gil": hold_interpreter,
    "sleep": lambda: time.sleep(100),
    "none": lambda: None,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--collective", action="store_true")
    parser.add_argument("--stall", type=float, default=60)
    parser.add_argument("--digest-of-rank", action="store_true", help="other settings on each rank")
    parser.add_argument("--junk", action="store_true", help="send junk to the store")
    parser.add_argument("--connect-timeout", type=float, default=30)
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--child", action="store_true", help="start a process that outlives its parent")
    options = parser.parse_args()
    place = discover(os.environ)
    if place.rank == options.rank and options.step < 0:
        FAULTS[options.fault]()
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.child:
        subprocess.Popen(["sleep", "100"])
    if options.collective:
        try:
            monitor, exchange = _with_torch(place, options)
        except DivergenceError as error:
            print(f"rank {place.rank} told: {error}")
            raise
    else:
        monitor, exchange = _alone(place, options)
    for step in range(options.steps):
        for microbatch in range(2):
            monitor.note("forward", step, microbatch, "layers.1")
            if (place.rank, step, microbatch) == (options.rank, options.step, 1):
                FAULTS[options.fault]()
            time.sleep(0.01)
        monitor.note("collective", step, peer=1 - place.rank)
        exchange(step)
        if place.rank == 0:
            print("step", step, flush=True)
    print(f"rank {place.rank} done")


def limits(options: argparse.Namespace) -> Limits:
    """A heartbeat that a busy machine does not miss, but where that is what is tested."""
    return Limits(4.0 if options.fault in ("stop", "gil") else 60.0, options.stall)


def _alone(place: Place, options: argparse.Namespace) -> tuple[Monitor, Callable[[int], None]]:
    monitor = Monitor.start(place, limits(options))
    print(f"rank {place.rank} is watched\n", end="", flush=True)  # one write: ranks' lines stay apart
    if place.shared_fd is None:
        return monitor, lambda step: None
    page = Page.attach(place.shared_fd)
    atexit.register(monitor.leave)
    atexit.register(monitor.finish)

    def behind(step: int) -> bool:
        return any(
            (sign.step is None or sign.step < step) and sign.state is not State.FINISHED
            for sign in page.signs().values()
        )

    def exchange(step: int) -> None:
        while behind(step):
            time.sleep(0.005)

    return monitor, exchange


def send_junk(place: Place) -> None:
    assert place.shared_fd is not None
    leader = json.loads(Page.attach(place.shared_fd).leader)
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"", b"\xff" * 64):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{leader['address']}")
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.sendall(data)
                connection.recv(64)
                connection.recv(64)


def _with_torch(place: Place, options: argparse.Namespace) -> tuple[Monitor, Callable[[int], None]]:
    import torch
    import torch.distributed as dist

    from weft.launch import rendezvous

    limit = timedelta(seconds=options.connect_timeout)
    store = rendezvous.connect(place, limit)
    if options.junk and place.rank == 1:
        send_junk(place)
    monitor = Monitor.start(place, limits(options), store)
    atexit.register(rendezvous.shutdown, monitor)
    settings = place.rank + 4 if options.digest_of_rank else 4
    agree(store, place, {"settings": f'{{"microbatches": {settings}}}'}, limit)
    rendezvous.init_process_group(place, store, "gloo", limit)
    value = torch.ones(2)
    return monitor, lambda step: dist.all_reduce(value)


if __name__ == "__main__":
    main()
