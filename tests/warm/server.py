"""The processes that jobs are forked from: a root, and others forked from it that have imported more.

A job is a child of the one that forked it. It ends with the connection of who asked for it, and all of them with the
run of tests: the pipe at the root's standard input is closed then, however that run ended.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.warm import REQUEST_BYTES
from tests.warm.imports import BASE, FLAVOURS, preload
from tests.warm.processes import Process, Rank, become, forget, kill_session

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "1",
}
"""Variables that the libraries look at when they are imported."""


class Server:
    """Forks a launcher for each connection to the door of its own flavour, and for another flavour a server.

    `life`: it is closed at the other end when the run of tests ends.
    """

    def __init__(self, flavour: str, life: int, doors: Mapping[str, socket.socket]) -> None:
        preload(flavour)
        gc.freeze()  # else each collection of a rank would walk, and so copy, all that was imported here
        self._flavour = flavour
        self._life = life
        self._doors = dict(doors)
        self._servers: list[Process] = []
        self._jobs: dict[socket.socket, Process | None] = {}
        self._woken, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serves until the run of tests ends; then kills the jobs that are left."""
        while True:
            ready = select.select([self._life, self._woken, *self._doors.values(), *self._jobs], [], [])[0]
            if self._life in ready:
                break
            if self._woken in ready:
                os.read(self._woken, 1 << 12)
                self._tell()
            for connection in [each for each in self._jobs if each in ready]:
                self._hear(connection)
            for flavour in [each for each, door in self._doors.items() if door in ready]:
                self._open(flavour)
        for job in filter(None, self._jobs.values()):
            kill_session(job)
        for server in self._servers:
            server.wait()

    def _open(self, flavour: str) -> None:
        """Lets someone in, or leaves the door to a server of that flavour."""
        if flavour == self._flavour:
            self._jobs[self._doors[flavour].accept()[0]] = None
            return
        door = self._doors.pop(flavour)
        self._servers.append(Process(functools.partial(_serve_flavour, flavour, self._life, door)))
        door.close()

    def _hear(self, connection: socket.socket) -> None:
        """Starts the job that is asked for, or ends it when nobody waits for it any more."""
        job, text, output = self._jobs[connection], b"", list[int]()
        with contextlib.suppress(OSError):
            text, output, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if text and job is None:
            job = self._jobs[connection] = Process(functools.partial(_launch, json.loads(text), output))
            _send(connection, job.pid)
        else:
            del self._jobs[connection]
            connection.close()
            if job is not None:
                kill_session(job)
        for descriptor in output:
            os.close(descriptor)

    def _tell(self) -> None:
        """Tells the exit codes of jobs that have ended."""
        for connection, job in [*self._jobs.items()]:
            code = job.poll() if job is not None else None
            if code is not None:
                del self._jobs[connection]
                _send(connection, code)
                connection.close()
        for server in self._servers:
            server.poll()


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked is gone; `_hear` is told
        connection.send(json.dumps(number).encode())


def _serve_flavour(flavour: str, life: int, door: socket.socket) -> None:
    """The process of another server. It closes what the root has open, for whose end others would see too late."""
    forget({0, 1, 2, life, door.fileno()})
    Server(flavour, life, {flavour: door}).run()


def _launch(request: Mapping[str, Any], output: Sequence[int]) -> object:
    """The launcher's process: `weft`, whose ranks are forked; or a script."""
    from weft.cli.main import main
    from weft.launch.running.local_ranks import Here

    os.setsid()
    for target, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, target)
    forget({0, 1, 2})
    os.chdir(request["cwd"])
    Here.start_process = Rank
    arguments = request["arguments"]
    if arguments[0].endswith(".py"):
        become(request["env"], arguments)
        return runpy.run_path(arguments[0], run_name="__main__")
    become(request["env"], ["weft", *arguments])
    sys.exit(main(arguments))


def serve(folder: str, descriptors: Sequence[int]) -> None:
    """The root's process: waits for the first request, and imports what all need. It removes `folder` in the end."""
    os.environ.update(QUIET)
    life = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    doors = {name: socket.socket(fileno=number) for name, number in zip(FLAVOURS, descriptors, strict=True)}
    if life not in select.select([life, *doors.values()], [], [])[0]:
        Server(BASE, life, doors).run()
    shutil.rmtree(folder)


if __name__ == "__main__":
    serve(sys.argv[1], [int(number) for number in sys.argv[2:]])
