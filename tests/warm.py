"""Jobs of ranks that start at once: forked from a process that has imported what every rank imports.

Importing PyTorch, and what the first optimizer imports, takes a rank longer than most tests' own work. Here `weft run`
and its ranks are forked from a process that has done so, instead of started anew. All else is as in any job: the
launcher's own code, a process for each rank, pipes, sockets, collectives, signals and exit codes. Tests of launching
and of faults start their jobs cold.

    test ──request──> server ──fork──> launcher (weft.cli.main) ──fork──> ranks (a script, by runpy)
         <──pid, later its exit code──
                      server ──fork──> a script of the tests ──fork──> ranks (a function; see `Ranks`)

The process that forks must not have used PyTorch's threads, so it is never pytest itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
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
import time
import traceback
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


def preload() -> None:
    """Imports what every rank would import for itself."""
    import safetensors.torch  # noqa: F401
    import torch._dynamo  # noqa: F401 - the first optimizer imports it

    import weft.cli.main
    import weft.torch  # noqa: F401


def serve(connection: socket.socket, more: Sequence[str]) -> None:
    """Forks a launcher for each request, one at a time, until the other end is closed."""
    preload()
    if more:
        import transformers.modeling_utils  # noqa: F401

    gc.freeze()  # else each collection of a rank would walk, and so copy, all that was imported here
    while True:
        text, received, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 2)
        if not text:
            return
        process = Process(functools.partial(_launch, connection, json.loads(text), received))
        for descriptor in received:
            os.close(descriptor)
        connection.send(json.dumps(process.pid).encode())
        connection.send(json.dumps(process.wait()).encode())


def _launch(connection: socket.socket, request: Mapping[str, Any], output: Sequence[int]) -> object:
    """The launcher's process: `weft`, whose ranks are forked; or a script."""
    from weft.cli.main import main
    from weft.launch.running.here import Here

    connection.close()
    os.setsid()
    for target, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["cwd"])
    Here.start_process = Rank
    arguments = request["arguments"]
    if arguments[0].endswith(".py"):
        _become(request["env"], arguments)
        return runpy.run_path(arguments[0], run_name="__main__")
    _become(request["env"], ["weft", *arguments])
    sys.exit(main(arguments))


# --- forked processes --------------------------------------------------------------------------------------------


class Process:
    """A process forked off this one. It does `work`, and ends as the interpreter would after it."""

    def __init__(self, work: Callable[[], object]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _end(work)

    def poll(self) -> int | None:
        """The exit code, or minus the number of a signal; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """The same, after its end."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Rank(Process):
    """A rank of a launcher; as much of ``subprocess.Popen`` as the launcher uses."""

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
        pipes = os.pipe(), os.pipe()

        def work() -> object:
            preexec_fn()
            for target, (_, writing) in enumerate(pipes, start=1):
                os.dup2(writing, target)
            _forget_the_launcher({0, 1, 2, *pass_fds})
            _become(env, command[1:])
            return runpy.run_path(command[1], run_name="__main__")

        super().__init__(work)
        for _, writing in pipes:
            os.close(writing)
        self.stdout, self.stderr = (os.fdopen(reading, "rb", 0) for reading, _ in pipes)


class Ranks:
    """A job of `n` ranks without a launcher: each runs `work(rank)`. What rank r writes goes to `folder/rank-r.txt`.

    Each job that a script starts so is closed by it.
    """

    def __init__(self, n: int, work: Callable[[int], object], folder: Path) -> None:
        from weft.watch.heartbeat import Page

        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _, self._shared = Page.create(n)
        self._processes = [Process(functools.partial(self._work, rank, n, work)) for rank in range(n)]

    def _work(self, rank: int, n: int, work: Callable[[int], object]) -> object:
        from weft.launch.environ import rank_environ

        os.environ |= {**rank_environ({}, rank, n, 1), "WEFT_SHARED_FD": str(self._shared)}
        output = os.open(self.folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target in (1, 2):
            os.dup2(output, target)
        try:
            return work(rank)
        except Exception:
            traceback.print_exc()  # weft leaves it to a launcher, which would show it
            raise

    def kill(self, *ranks: int) -> None:
        """Kills ranks as the machine would; all of them if none is named."""
        for rank in ranks or range(len(self._processes)):
            if self._processes[rank].poll() is None:
                os.kill(self._processes[rank].pid, signal.SIGKILL)

    def wait(self, seconds: float, *ranks: int) -> dict[int, int]:
        """The exit codes (negative: a signal) of `ranks`, or of all. If some still run after `seconds`, all are killed,
        and the error says what they wrote."""
        deadline = time.monotonic() + seconds
        wanted = ranks or range(len(self._processes))
        while None in (codes := {rank: self._processes[rank].poll() for rank in wanted}).values():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"not all ranks ended: {codes}\n{self.text()}")
            time.sleep(0.002)
        return {rank: code for rank, code in codes.items() if code is not None}

    def check(self, seconds: float) -> None:
        """Waits; an error with all output unless every rank ended well."""
        ends = self.wait(seconds)
        self.close()
        assert not any(ends.values()), f"exit codes {ends}\n{self.text()}"

    def close(self) -> None:
        """Gives back the memory that the ranks share."""
        os.close(self._shared)

    def text(self) -> str:
        """All that the ranks wrote."""
        files = sorted(self.folder.glob("rank-*.txt"))
        return "\n".join(f"--- {file.stem}\n{file.read_text(errors='replace')}" for file in files)


def _forget_the_launcher(kept: set[int]) -> None:
    """As after exec: signals have their default effects, and only some files are open."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
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
