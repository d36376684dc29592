"""Ranks on this machine: one process each, in a process group of its own, that ends with whoever started it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, ClassVar

from weft.errors import LaunchError
from weft.launch.discovery import SHARED_FD
from weft.launch.guard import MARK, Guard
from weft.launch.running.job import Process
from weft.watch.files.operation import Outside
from weft.watch.judge import Verdict
from weft.watch.process import die_with_parent, host_name, is_stopped

Take = Callable[[int, bool, bytes], None]
"""Is given a rank, whether it wrote to its standard error, and what; nothing at the end of that."""


class Here:
    """See the module.

    ``start_process`` starts one rank. It is called as ``subprocess.Popen`` would be. Tests set another one, which forks
    ranks from a process that has imported PyTorch.

    Args:
        command: What each rank runs.
        shared: The file descriptor of the page of their signs.
        selector: Whoever runs it calls what it gives.
        take: Is given their output.
    """

    start_process: ClassVar[Callable[..., Process]] = subprocess.Popen
    lost: Verdict | None = None
    gone: Sequence[str] = ()
    ready = True

    def __init__(
        self, command: Sequence[str], shared: int, selector: selectors.BaseSelector, take: Take
    ) -> None:
        self._command, self._shared, self._selector, self._take = command, shared, selector, take
        self._guard = Guard()
        self._processes: dict[int, Process] = {}
        self._running: set[int] = set()
        self._host = host_name()

    def start(self, rank: int, environ: Mapping[str, str], typed: bool = False) -> None:
        """Starts a rank. ``typed``: it has this process's standard input, else none.

        Raises:
            LaunchError: It cannot be started.
        """
        starter = os.getpid()

        def in_child() -> None:
            os.setpgid(0, 0)
            die_with_parent(starter)

        try:
            process = self.start_process(
                self._command,
                env={**environ, SHARED_FD: str(self._shared), MARK: self._guard.mark},
                stdin=None if typed else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[self._shared],
                preexec_fn=in_child,
            )
        except OSError as error:
            raise LaunchError(f"rank {rank} cannot be started: {self._command[0]}: {error}") from error
        self._processes[rank] = process
        self._running.add(rank)
        self._guard.watch(process.pid)
        for pipe, is_error in ((process.stdout, False), (process.stderr, True)):
            assert pipe is not None
            self._read(rank, pipe, is_error)

    def _read(self, rank: int, pipe: IO[bytes], is_error: bool) -> None:
        def ready() -> None:
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                self._selector.unregister(pipe)
            self._take(rank, is_error, data)

        self._selector.register(pipe, selectors.EVENT_READ, ready)

    def exchange(self, listening: bool = True) -> None:
        """Nothing: signs of ranks on this machine are seen at once."""

    def instead(self, verdict: Verdict) -> Verdict:
        """The verdict itself: there is one host."""
        return verdict

    def ends(self) -> list[tuple[int, int]]:
        """Ranks that ended since the last call, with their exit codes; a signal's is negative."""
        codes = {rank: self._processes[rank].poll() for rank in sorted(self._running)}
        found = [(rank, code) for rank, code in codes.items() if code is not None]
        for rank, _ in found:
            self._running.discard(rank)
            self._guard.forget(self._processes[rank].pid)
        return found

    def pid(self, rank: int) -> int:
        """The process of a rank; 0 before it is known."""
        return self._processes[rank].pid if rank in self._processes else 0

    def host(self, rank: int) -> str:
        """The name of the host of a rank."""
        return self._host

    def is_stopped(self, rank: int) -> bool:
        """True if its process stands still because of a signal or a debugger."""
        return is_stopped(self._processes[rank].pid)

    def look_at_files(self, outside: Outside) -> None:
        """Shows in what ranks stand that do not show it themselves."""
        for rank in self._running:
            outside.look(rank, self._processes[rank].pid)

    def send(self, rank: int, number: int, alone: bool = False) -> None:
        """A signal to a rank's whole process group: its own children must not outlive it. ``alone``: to itself only."""
        if rank in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.kill if alone else os.killpg)(self._processes[rank].pid, number)

    def close(self) -> None:
        """Kills what is left; returns when nothing of the job runs on this machine."""
        for rank in self._processes:
            self.send(rank, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._guard.close()
        del self._take  # that of whoever has this: in a circle both would live on
