"""Jobs of ranks that start at once: forked from a process that has imported what every rank imports.

Importing PyTorch, and what the first optimizer imports, takes a rank longer than most tests' own work. Here `weft run`
and its ranks are forked from a process that has done so, instead of started anew. All else is as in any job: the
launcher's own code, a process for each rank, pipes, sockets, collectives, signals and exit codes. Tests of launching
and of faults start their jobs cold.

    test ──request──> server ──fork──> launcher (weft.cli.main) ──fork──> ranks (runpy)
         <──pid, later its exit code──
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
_REQUEST_BYTES = 1 << 20
_KEPT: list[object] = []
"""A script's globals live until its process ends, so that no group of ranks is freed beside its threads."""


class Job:
    """A launcher that the server forked; as much of ``subprocess.Popen`` as the tests use."""

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
        """What it wrote, after its end."""
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
            self.returncode = json.loads(self._connection.recv(64))
        return self.returncode


def start(arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Job:
    """`weft ARGUMENTS`, or a Python script and its arguments, in a session of its own."""
    connection = _server("--smdistributed" not in arguments)
    request = {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd or Path.cwd())}
    text = json.dumps(request).encode()
    assert len(text) < _REQUEST_BYTES, "the request is too long"
    output = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]
    socket.send_fds(connection, [text], [file.fileno() for file in output])
    return Job(connection, json.loads(connection.recv(64)), output)


def run(arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float) -> tuple[int, str]:
    """The same to its end: the exit code and what it wrote; minus SIGKILL if it took `timeout` seconds."""
    job = start(arguments, env, cwd)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(timeout)
    if job.returncode is None:
        os.killpg(job.pid, signal.SIGKILL)
    output = "".join(job.communicate())
    assert job.returncode is not None
    return job.returncode, output


@functools.cache
def _server(transformers: bool) -> socket.socket:
    """The connection to one of this process's servers, which end with it.

    `transformers`: it is imported too; it looks for the names of smdistributed as it is imported.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.warm",
            str(theirs.fileno()),
            *(["transformers"] if transformers else []),
        ],
        cwd=ROOT,
        env={**os.environ, **quiet, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


# --- in the server -----------------------------------------------------------------------------------------------


def serve(connection: socket.socket, more: Sequence[str]) -> None:
    """Forks a launcher for each request, one at a time, until the other end is closed."""
    import torch._dynamo  # noqa: F401 - the first optimizer imports it

    import weft.cli.main
    import weft.torch  # noqa: F401

    if more:
        import transformers.modeling_utils  # noqa: F401

    while True:
        text, received, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 2)
        if not text:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _launch(json.loads(text), received)
        for descriptor in received:
            os.close(descriptor)
        connection.send(json.dumps(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _launch(request: Mapping[str, Any], output: Sequence[int]) -> NoReturn:
    """The launcher's process: `weft`, whose ranks are forked."""
    from weft.cli.main import main
    from weft.launch import local

    os.setsid()
    for target, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["cwd"])
    local.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined]
        Popen=Rank, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )
    arguments = request["arguments"]
    if arguments[0].endswith(".py"):
        _become(request["env"], arguments)
        _end(lambda: runpy.run_path(arguments[0], run_name="__main__"))
    _become(request["env"], ["weft", *arguments])
    _end(lambda: sys.exit(main(arguments)))


class Rank:
    """A rank, forked from its launcher; as much of ``subprocess.Popen`` as the launcher uses."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdin: int | None,
        stdout: int,
        stderr: int,
        pass_fds: Iterable[int],
        preexec_fn: Callable[[], None],
    ) -> None:
        out, err = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            preexec_fn()
            os.dup2(out[1], 1)
            os.dup2(err[1], 2)
            _forget_the_launcher({0, 1, 2, *pass_fds})
            _become(env, command[1:])
            _end(lambda: runpy.run_path(command[1], run_name="__main__"))
        for _, writing in (out, err):
            os.close(writing)
        self.stdout, self.stderr = (os.fdopen(reading, "rb", 0) for reading, _ in (out, err))

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _forget_the_launcher(kept: set[int]) -> None:
    """As after exec: signals have their default effects, and only some files are open."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _become(env: Mapping[str, str], arguments: Sequence[str]) -> None:
    """The variables, arguments and module path of a process that was started so."""
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(arguments)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(arguments[0]).parent), *paths, *(path for path in sys.path if path not in paths)]
    if env.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    random.seed()
    custom = Path(paths[0]) / "sitecustomize.py" if paths else None
    if custom is not None and custom.is_file():
        runpy.run_path(str(custom))


def _end(work: Callable[[], object]) -> NoReturn:
    """Does the work and ends the process as the interpreter would."""
    code: object = 0
    try:
        _KEPT.append(work())
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code or 0)  # type: ignore[arg-type]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
