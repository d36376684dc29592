"""make random-faults: signals at random moments to random processes of small jobs, until stopped, or so many.

python -m tests.fault.campaign [COUNT] [--seed SEED] [--cold SHARE]

Each run starts a job (`workers/anywhere.py`), waits until one rank enters one phase, and a moment longer, and strikes.
Then it must end within the promised time, name the rank that was struck, and leave nothing behind: no process, no file
in the temporary folder or in /dev/shm, and no save that is damaged. A busy machine gets more time, by its load.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.launching import Running, processes_left, started
from weft.checkpoint.find import faults, in_order
from weft.watch.process import is_alive

JOB = Path(__file__).parent / "workers" / "anywhere.py"
PROMISED_S = 3.0
OTHERS_S = 10.0
"""The same under a launcher with a delay of its own."""
HEARTBEAT_S = 3.0
SETTINGS = {"heartbeat_timeout": HEARTBEAT_S, "wait_timeout": 60.0}
"""Given to the launcher: what a script says counts from `init` on only."""
START_S = 240.0
"""A busy machine may take minutes to import PyTorch four times."""
POLITE_S = 5.0
"""How long a launcher that is told to end lets its ranks end by themselves."""
PHASES = ("import", "init", "trace", "train", "save", "shutdown", "end")
MESHES = {"pipeline of 2": (2, 2), "2 replicas": (2, 1), "pipeline of 4": (4, 4), "2 x 2": (4, 2)}
STRIKES = [("rank", name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")] + [
    ("launcher", name) for name in ("SIGKILL", "SIGTERM", "SIGINT")
]


class FaultError(Exception):
    """What must not be."""


@dataclass(frozen=True)
class Run:
    """What is struck when. `late_s`: how long after the rank has entered the phase."""

    mesh: str
    whom: str
    signal: str
    rank: int
    phase: str
    late_s: float
    warm: bool
    launcher: str = "weft"

    @classmethod
    def draw(cls, draw: random.Random, cold: float) -> Run:
        mesh = draw.choice(list(MESHES))
        whom, name = draw.choice(STRIKES)
        phase = draw.choice(PHASES)
        late_s = draw.choice([0.0, draw.uniform(0, 0.05), draw.uniform(0, 0.5)])
        rank, warm = draw.randrange(MESHES[mesh][0]), draw.random() >= cold
        others = not warm and whom == "rank" and shutil.which("mpirun") is not None and draw.random() < 0.5
        return cls(mesh, whom, name, rank, phase, late_s, warm, "mpirun" if others else "weft")

    def __str__(self) -> str:
        target = f"rank {self.rank}" if self.whom == "rank" else "the launcher"
        moment = f"{self.late_s:.3f} s after rank {self.rank} entered {self.phase}"
        how = self.launcher if self.launcher != "weft" else "warm" if self.warm else "cold"
        return f"{self.mesh}, {how}: {self.signal} to {target}, {moment}"

    @property
    def bound_s(self) -> float:
        """Within which time nothing may be left."""
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        frozen = HEARTBEAT_S if self.signal == "SIGSTOP" else 0.0
        polite = POLITE_S if self.whom == "launcher" and self.signal != "SIGKILL" else 0.0
        return frozen + polite + (OTHERS_S if self.launcher != "weft" else PROMISED_S) * (1.0 + busy)


@dataclass
class Struck:
    """What became of a run. `after_s`: from the signal to the end; `late`: the job had ended before."""

    after_s: float
    late: bool
    code: int
    said: str


@dataclass
class Campaign:
    """Counts what has run."""

    ran: Counter[str] = field(default_factory=Counter)
    took_s: dict[str, list[float]] = field(default_factory=dict)
    faults: int = 0
    late: int = 0

    def run(self, one: Run) -> None:
        try:
            struck = strike(one)
        except FaultError as fault:
            self.faults += 1
            print(f"\n===== {one}\n{fault}\n=====", flush=True)
            return
        self.ran[f"{one.signal} to a {one.whom}"] += 1
        self.late += struck.late
        if not struck.late:
            self.took_s.setdefault(f"{one.signal} to a {one.whom}", []).append(struck.after_s)

    def report(self) -> str:
        rows = ""
        for kind, took in sorted(self.took_s.items()):
            gone = f"gone after {statistics.median(took):.1f} s (median), {max(took):.1f} s (most)"
            rows += f"\n  {kind:24} {self.ran[kind]:4} runs; {gone}"
        return (
            f"{sum(self.ran.values())} runs, {self.faults} faults; {self.late} jobs had ended before:{rows}"
        )


def strike(one: Run) -> Struck:
    """One run. FaultError, with all output, unless it ends as it must."""
    ranks, partitions = MESHES[one.mesh]
    with clean() as (folder, temporary):
        environ = {"TMPDIR": str(temporary), "PYTHONWARNINGS": "ignore"}
        with started(
            ranks, JOB, [str(folder), str(partitions)], environ, SETTINGS, one.launcher, warm=one.warm
        ) as job:
            pid = _reached(one, folder, job)
            time.sleep(one.late_s)
            before = job.process.poll() is not None
            began = time.monotonic()
            target = pid if one.whom == "rank" else job.process.pid
            late = before or not is_alive(target)
            if not late:
                os.kill(target, signal.Signals[one.signal])
            done = _end(job, began + one.bound_s)
            after_s = time.monotonic() - began
            left = _left(job, folder, began + one.bound_s)
            found = Struck(after_s, late, -99 if done is None else done, "")
            if done is not None:
                output = job.process.communicate()
                found.said = output[1]
            found.late = found.late or _all_others_ended(one, folder)
            problem = _problem(one, found, left, done is None)
        problem = problem or _leavings(folder, temporary)
        if problem:
            raise FaultError(
                f"{problem}\nafter {found.after_s:.2f} s of {one.bound_s:.1f} s, code {found.code}\n{found.said}"
            )
        return found


@contextmanager
def clean() -> Iterator[tuple[Path, Path]]:
    """A folder for the job, and one for its temporary files."""
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as name:
        folder, temporary = Path(name) / "job", Path(name) / "tmp"
        folder.mkdir()
        temporary.mkdir()
        yield folder, temporary


def _reached(one: Run, folder: Path, job: Running) -> int:
    """The process of the rank, once it has entered the phase; that of a job that ends before it does so, too."""
    path, deadline = folder / f"rank-{one.rank}", time.monotonic() + START_S
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and (one.phase in lines[1:] or job.process.poll() is not None):
            return int(lines[0])
        if job.process.poll() is not None:
            raise FaultError(f"the job ended before rank {one.rank} began\n{job.process.communicate()[1]}")
        time.sleep(0.002)
    reached = {path.name: path.read_text().split()[-1] for path in sorted(folder.glob("rank-*"))}
    raise FaultError(
        f"rank {one.rank} did not enter {one.phase} in {START_S:g} s; where the ranks are: {reached}"
    )


def _end(job: Running, deadline: float) -> int | None:
    """The launcher's exit code."""
    while job.process.poll() is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)
    return job.process.returncode


def _left(job: Running, folder: Path, deadline: float) -> list[str]:
    """What still runs at the deadline."""
    known = {
        path.name: path.read_text().split()[:1]
        for path in [*folder.glob("rank-*"), folder / "child"]
        if path.exists()
    }
    while True:
        left = [f"process {pid}" for pid in processes_left(job.mark, 0)]
        left += [f"{name} ({pid[0]})" for name, pid in known.items() if pid and is_alive(int(pid[0]))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def _all_others_ended(one: Run, folder: Path) -> bool:
    """A rank was stopped after all had left `weft.shutdown`: under other launchers nobody watches it then."""
    others = [folder / f"rank-{rank}" for rank in range(MESHES[one.mesh][0]) if rank != one.rank]
    ended = all(path.exists() and path.read_text().endswith("end\n") for path in others)
    return one.signal == "SIGSTOP" and one.launcher != "weft" and ended


def _problem(one: Run, found: Struck, left: list[str], running: bool) -> str:
    if (running or left) and not (found.late and one.signal == "SIGSTOP"):
        return f"left behind: {', '.join([*left, *(['the launcher'] if running else [])])}"
    if found.late or found.code == 0:  # a signal may come when a rank has done all that it had to
        return ""
    told = [
        line for line in found.said.splitlines() if not line.startswith("step ")
    ]  # a slow job shows its progress
    first = told[0] if told else ""
    if one.whom == "launcher":
        number = signal.Signals[one.signal]
        return "" if found.code in (-number, 128 + number) else f"the code is not {128 + number}"
    if one.launcher != "weft":
        return _named_elsewhere(one, found.said)
    if not re.match(rf"weft: rank {one.rank} ", first):
        return f"the first line does not name rank {one.rank}: {first!r}"
    return ""


def _named_elsewhere(one: Run, said: str) -> str:
    """The first rank that is named must be the one that was struck; the launcher names it where it is quicker."""
    own = re.findall(r"^weft: rank (\d+) ", said, re.MULTILINE)
    theirs = re.findall(r"\[\[\d+,\d+\],(\d+)\]|process rank (\d+) with", said)
    named = own or [first or second for first, second in theirs]
    return "" if named and int(named[0]) == one.rank else f"rank {one.rank} is not named first: {named}"


def _leavings(folder: Path, temporary: Path) -> str:
    # PyTorch makes a folder for its compiler's cache, and keeps it.
    kept = ("torchinductor_", "ompi.")
    if names := [path.name for path in temporary.iterdir() if not path.name.startswith(kept)]:
        return f"left in the temporary folder: {', '.join(names)}"
    if names := [name for name in os.listdir("/dev/shm") if "weft" in name]:
        return f"left in /dev/shm: {', '.join(names)}"
    saves = folder / "saves"
    for save in in_order(saves, None) if saves.exists() else ():
        if save.index is not None and (damage := faults(save.folder, save.index)):
            return f"a damaged save: {damage}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.campaign")
    parser.add_argument("count", type=int, nargs="?", help="how many runs; without end if not given")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument(
        "--cold", type=float, default=0.25, help="the share of jobs that import PyTorch themselves"
    )
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    draw, campaign, count = random.Random(given.seed), Campaign(), 0
    try:
        while given.count is None or count < given.count:
            campaign.run(Run.draw(draw, given.cold))
            count += 1
            if count % 20 == 0:
                print(campaign.report(), flush=True)
    except KeyboardInterrupt:
        pass
    print(campaign.report())
    return bool(campaign.faults)


if __name__ == "__main__":
    sys.exit(main())
