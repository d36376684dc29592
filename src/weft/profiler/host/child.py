"""The process that measures a host: started by the first rank of the host, and gone when that is.

A thread of the rank would take its interpreter's lock, twice a second and for as long as the look at the host takes.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weft.errors import WeftError
from weft.profiler.clock import Clock
from weft.profiler.facts import SUFFIX, read_facts
from weft.profiler.host.sampler import Gpus, Sampler
from weft.profiler.samples import line_of, open_samples
from weft.untrusted import shown_path
from weft.watch.process import host_name

EVERY_S = 0.5
_LOG = logging.getLogger("weft")


def start_sampler(folder: Path) -> Callable[[], None]:
    """Measure this host into a file of the folder from now on; the result ends that."""
    if importlib.util.find_spec("psutil") is None:
        _LOG.warning(
            "the recording has nothing of the host's cores, memory, disks and network, because psutil is not "
            "installed: pip install weft[report]"
        )
        return lambda: None
    source = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        _LOG.warning(
            "the recording has nothing of the host: its sampler cannot be started: %s", error.strerror
        )
        return lambda: None

    def end() -> None:
        if (process.poll() or 0) > 0:
            _LOG.warning(
                "the recording has nothing more of the host since its sampler ended with exit code %d; to see why: "
                "python -m %s %s $$", process.returncode, __name__, shown_path(folder),
            )  # fmt: skip
        with suppress(OSError):
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)

    return end


class LocalRanks:
    """The process ids of the ranks that say in their files that they are of this host.

    Containers of one machine share its clock. Their names differ, and so do their processes.
    """

    def __init__(self, folder: Path, clock: Clock, host: str) -> None:
        self._folder, self._clock, self._host = folder, clock, host
        self._known: dict[Path, tuple[int, int]] = {}

    def __call__(self) -> list[int]:
        """Those known now; files are read again when they have changed."""
        for path in self._folder.glob(f"rank*{SUFFIX}"):
            with suppress(OSError, WeftError):
                changed = path.stat().st_mtime_ns
                if self._known.get(path, (0, 0))[0] != changed:
                    facts, clock = read_facts(path)
                    here = clock.identity == self._clock.identity and facts.host == self._host
                    self._known[path] = changed, facts.pid if here else 0
        return [pid for _, pid in self._known.values() if pid > 0]


def main(arguments: list[str]) -> None:
    """Write samples until the parent is gone."""
    folder, parent = Path(arguments[0]), int(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the ranks
    clock = Clock.here()
    system = importlib.import_module("psutil")
    sampler = Sampler(system, LocalRanks(folder, clock, host_name()), Gpus(), own_pid=os.getpid())
    file = open_samples(folder, host_name(), clock)
    next_s = time.monotonic() + EVERY_S
    while os.getppid() == parent:
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s = max(next_s + EVERY_S, time.monotonic())
        file.write(line_of(sampler.sample()))


if __name__ == "__main__":
    main(sys.argv[1:])
