"""Processes that are forked off this one: launchers, ranks, and jobs of ranks without a launcher."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_KEPT: list[object] = []
"""A script's globals live until its process ends, so that no group of ranks is freed beside its threads."""


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
            forget({0, 1, 2, *pass_fds})
            become(env, command[1:])
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


def kill_session(leader: Process) -> None:
    """Kills a process that leads a session, and what is in that session; also what begins meanwhile."""
    for _ in range(100):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and _session(name) == leader.pid]
        if leader.poll() is None:
            pids.append(leader.pid)  # it may not lead its session yet
        elif not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _session(pid: str) -> int:
    """The session of a process that still runs, else 0."""
    try:
        state, _, _, session = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return 0
    return 0 if state in "ZX" else int(session)


def forget(kept: set[int]) -> None:
    """As after exec: signals have their default effects, and only the files `kept` are open."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def become(env: Mapping[str, str], arguments: Sequence[str]) -> None:
    """The variables, arguments and module path of a process that was started so."""
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(arguments)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(arguments[0]).parent), *paths, *(path for path in sys.path if path not in paths)]
    if env.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
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
