"""Jobs of several ranks that one process forks off after it has imported torch: a job costs a moment, not seconds.

The process that forks must not have used torch's threads, so it is a script of its own and never pytest itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.launching import FOREIGN
from weft.launch.environ import rank_environ
from weft.watch.heartbeat import Page


def preload() -> None:
    """Import what ranks would import otherwise, each for itself; the first optimizer brings hundreds of modules."""
    import safetensors.torch  # noqa: F401
    import torch

    torch.optim.SGD([torch.zeros(1)])


class Forked:
    """A job of `n` ranks, each of which runs `work(rank)`; what rank r writes goes to `folder/rank-r.txt`."""

    def __init__(self, n: int, work: Callable[[int], None], folder: Path) -> None:
        preload()
        self.folder = folder
        self.ends: dict[int, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._page, self._shared = Page.create(n)
        self.pids = {rank: self._start(rank, n, work) for rank in range(n)}

    def _start(self, rank: int, n: int, work: Callable[[int], None]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.environ |= rank_environ({}, rank, n, 1)
            os.environ["WEFT_SHARED_FD"] = str(self._shared)
            output = os.open(self.folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            work(rank)
            sys.stdout.flush()
            os._exit(0)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        finally:
            os._exit(1)

    def kill(self, *ranks: int) -> None:
        """Kills ranks as the machine would; all of them if none is named."""
        for rank in ranks or self.pids:
            if rank not in self.ends:
                os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, seconds: float, *ranks: int) -> Mapping[int, int]:
        """The exit codes (negative: a signal) of `ranks`, or of all. If some still run after `seconds`, all are killed,
        and the error says what they wrote."""
        deadline = time.monotonic() + seconds
        while missing := [rank for rank in ranks or self.pids if rank not in self.ends]:
            for rank in missing:
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.ends[rank] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"ranks {missing} did not end\n{self.text()}")
            time.sleep(0.002)
        return self.ends

    def first_end(self, seconds: float) -> int:
        """The rank that ends first."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for rank, pid in self.pids.items():
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.ends[rank] = os.waitstatus_to_exitcode(status)
                    return rank
            time.sleep(0.002)
        self.kill()
        raise AssertionError(f"no rank ended\n{self.text()}")

    def check(self, seconds: float) -> None:
        """Waits; an error with all output unless every rank ended well."""
        ends = self.wait(seconds)
        self.close()
        assert not any(ends.values()), f"exit codes {ends}\n{self.text()}"

    def close(self) -> None:
        os.close(self._shared)

    def text(self) -> str:
        """All that the ranks wrote."""
        files = sorted(self.folder.glob("rank-*.txt"))
        return "\n".join(f"--- {file.stem}\n{file.read_text(errors='replace')}" for file in files)


def run_script(script: Path, *args: str, timeout: float = 900) -> str:
    """What a script that forks jobs wrote; it has to end with "passed"."""
    root = Path(__file__).parents[1]
    environ = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    environ |= {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *args], env=environ, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), f"{done.stdout}\n{done.stderr}"
    return done.stdout
