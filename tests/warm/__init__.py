"""Jobs of ranks that start at once: forked from a process that has imported what every rank imports.

Importing PyTorch, and what the first optimizer imports, takes a rank longer than most tests' own work. Here `weft run`
and its ranks are forked from a process that has done so, instead of started anew. All else is as in any job: the
launcher's own code, a process for each rank, pipes, sockets, collectives, signals and exit codes. Tests of launching
and of faults start their jobs cold.

A run of tests has one tree of servers, however many processes it tests in. `tests/conftest.py` starts the root before
pytest-xdist starts its workers, who find the folder with its sockets by a variable. A process without that variable
starts a tree of its own. What is imported is imported once, at the first request that needs it.

    root: PyTorch, weft ──fork──> launcher (weft.cli.main) ──fork──> ranks (a script, by runpy)
      │                 ──fork──> a script of the tests ──fork──> ranks (a function; see `Ranks`)
      ├─fork─> server: transformers too ──fork──> launchers and scripts, as above
      └─fork─> server: TensorFlow, Keras too ──fork──> the same

    test ──request──> socket of a flavour ──> server
         <──pid, later the exit code──

The processes that fork must not have used the threads of PyTorch or TensorFlow, so none is pytest itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.warm.imports import BASE, FLAVOURS
from tests.warm.imports import preload as preload
from tests.warm.processes import Process as Process
from tests.warm.processes import Rank as Rank
from tests.warm.processes import Ranks as Ranks

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "TEST_WARM"
"""The variable with the folder of the servers' sockets."""
REQUEST_BYTES = 1 << 20


class ServerEndedError(RuntimeError):
    """A server ended before the job that it was asked for; the text has what the servers wrote."""


class Job:
    """A launcher that a server forked; as much of ``subprocess.Popen`` as the tests use."""

    def __init__(self, connection: socket.socket, pid: int, output: Sequence[IO[str]]) -> None:
        self._connection = connection
        self._output = output
        self._texts: list[str] = []
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the number of its signal; None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The same, after at most `timeout` seconds."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a warm job", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output and its errors, after its end."""
        self.wait(timeout)
        if not self._texts:
            for file in self._output:
                with file:
                    file.seek(0)
                    self._texts.append(file.read())
        out, err = self._texts
        return out, err

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            try:
                self.returncode = _number(self._connection)
            except ServerEndedError:
                self.returncode = -signal.SIGKILL
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)  # there is nobody else who would
                raise
            finally:
                self._connection.close()
        return self.returncode


def start(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, flavour: str | None = None
) -> Job:
    """`weft ARGUMENTS`, or a Python script and its arguments, in a session of its own.

    `flavour`: one of `FLAVOURS`; without it transformers is imported too, unless the job brings the names of
    smdistributed, for which transformers looks as it is imported.
    """
    name = flavour or (BASE if "--smdistributed" in arguments else "transformers")
    text = json.dumps(
        {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd or Path.cwd())}
    ).encode()
    assert len(text) < REQUEST_BYTES, "the request is too long"
    output = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
    try:
        connection.connect(str(_folder() / name))
        socket.send_fds(connection, [text], [file.fileno() for file in output])
    except OSError as error:
        connection.close()
        raise ServerEndedError(f"no server of warm jobs hears: {error}\n{_log()}") from error
    return Job(connection, _number(connection), output)


def run(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float, flavour: str | None = None
) -> tuple[int, str]:
    """The same to its end: the exit code and what it wrote; minus SIGKILL if it took `timeout` seconds."""
    job = start(arguments, env, cwd, flavour)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(timeout)
    if job.returncode is None:
        os.killpg(job.pid, signal.SIGKILL)
    output = "".join(job.communicate())
    assert job.returncode is not None
    return job.returncode, output


def serve() -> str:
    """Starts a root, which ends with this process; gives the folder of its sockets. It imports nothing yet."""
    folder = Path(tempfile.mkdtemp(prefix="weft-"))
    doors = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in FLAVOURS]
    for name, door in zip(FLAVOURS, doors, strict=True):
        door.bind(str(folder / name))
        door.listen(128)
    descriptors = [door.fileno() for door in doors]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm.server", str(folder), *map(str, descriptors)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, pass_fds=descriptors, stdin=subprocess.PIPE,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    for door in doors:
        door.close()
    atexit.register(_end, process, folder)
    return str(folder)


def _end(root: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends the servers, which see that their standard input is closed."""
    assert root.stdin is not None
    root.stdin.close()
    root.wait()
    shutil.rmtree(folder, ignore_errors=True)  # it does so itself, unless it was killed


@functools.cache
def _folder() -> Path:
    return Path(os.environ.get(ADDRESS) or serve())


def _number(connection: socket.socket) -> int:
    """The number that a server sends: of a process, or its exit code."""
    text = b""
    with contextlib.suppress(OSError):
        text = connection.recv(64)
    if not text:
        raise ServerEndedError(f"the server of this job has ended\n{_log()}")
    return int(json.loads(text))


def _log() -> str:
    """The text that the servers wrote."""
    try:
        return (_folder() / "log").read_text(errors="replace")
    except OSError:
        return ""
