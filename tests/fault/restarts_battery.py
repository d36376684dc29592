"""make restarts: a run that is killed at random moments, again and again, has the weights of one that never was.

python -m tests.fault.restarts_battery [COUNT] [--seed SEED] [--mean SECONDS]

A run has 300 steps and saves every 10. The times between failures are exponential; each kills a random rank, or now and
then the launcher. `weft run --max-restarts` starts the job again, and this program a launcher that was killed. Runs
follow each other until there were COUNT restarts. Each must end with the weights and the losses of the run that nothing
befell, and a step that was done twice must have had the same loss twice.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.launching import Running, processes_left, started
from weft.watch.process import is_alive

JOB = Path(__file__).parent / "workers" / "restarting.py"
STEPS, EVERY, RANKS = 300, 10, 2
MEAN_S = 4.0
OF_LAUNCHER = 0.1
"""The share of failures that hit the launcher."""
LONGEST_S = 900.0
"""For one run: its machine may be busy."""


def losses(folder: Path) -> dict[int, str]:
    """The losses by step, of all attempts; a step that was done twice must have had the same loss."""
    found: dict[int, str] = {}
    for file in sorted(folder.glob("losses-*")):
        for line in file.read_text().splitlines():
            step, loss = line.split()
            assert found.setdefault(int(step), loss) == loss, f"step {step} of {file.name}"
    return found


@dataclass(frozen=True)
class End:
    """What a run came to: its losses, and the checksum of its weights."""

    losses: dict[int, str]
    weights: str

    @classmethod
    def of(cls, folder: Path) -> End:
        return cls(losses(folder), (folder / "end").read_text())


@dataclass
class Battery:
    """Strikes runs. `restarts` counts the failures so far, `before` those of earlier runs.

    Each failure makes the mean time to the next one 5 % longer: on a machine that is busy just then a start may take
    as long as that time, and the run would not come on.
    """

    draw: random.Random
    mean_s: float = MEAN_S
    steps: int = STEPS
    pause_s: float = 0.02
    restarts: int = 0
    before: int = 0
    of_launcher: int = 0

    def run(self, folder: Path, asynchronous: bool) -> End:
        """One run to its end, however often it is killed."""
        deadline = time.monotonic() + LONGEST_S
        self.before = self.restarts
        given = [str(folder), str(self.steps), "--every", str(EVERY), "--pause", str(self.pause_s)]
        given += ["--asynchronous"] if asynchronous else []
        while not (folder / "end").exists():
            with started(RANKS, JOB, given, options=["--max-restarts", "1000"], warm=True) as job:
                killed = self._strike(job, folder, deadline)
                said = job.process.communicate()[1]
                left = processes_left(job.mark)
            assert not left, f"left behind: {left}"
            # by chance three attempts are killed in the same step: then whoever watches starts it once more
            chance = "no progress in 3 attempts" in said
            assert killed or chance or job.process.returncode == 0, said
            self.restarts += killed or chance
        return End.of(folder)

    def _strike(self, job: Running, folder: Path, deadline: float) -> bool:
        """Kills ranks until the job ends; whether the launcher was killed."""
        while True:
            mean_s = self.mean_s * 1.05 ** (self.restarts - self.before)
            until = time.monotonic() + self.draw.expovariate(1 / mean_s)
            while time.monotonic() < until:
                assert time.monotonic() < deadline, "the run does not come to its end"
                if job.process.poll() is not None:
                    return False
                time.sleep(0.01)
            if self.draw.random() < OF_LAUNCHER:
                os.kill(job.process.pid, signal.SIGKILL)
                self.of_launcher += 1
                return True
            rank = folder / f"process-{self.draw.randrange(RANKS)}"
            with contextlib.suppress(OSError, ValueError):
                pid = int(rank.read_text())
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
                    self.restarts += 1


def undisturbed(steps: int) -> End:
    """The same run without a failure."""
    with tempfile.TemporaryDirectory(prefix="weft-restarts-") as name:
        with started(RANKS, JOB, [name, str(steps), "--every", str(EVERY)], warm=True) as job:
            job.wait(LONGEST_S).check()
        return End.of(Path(name))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.restarts_battery")
    parser.add_argument("count", type=int, nargs="?", default=200, help="how many restarts")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--mean", type=float, default=MEAN_S, help="seconds between failures, in the mean")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    battery, whole, runs, bad = Battery(random.Random(given.seed), given.mean), undisturbed(STEPS), 0, 0
    while battery.restarts < given.count:
        before, began = battery.restarts, time.monotonic()
        with tempfile.TemporaryDirectory(prefix="weft-restarts-") as name:
            try:
                same, why = battery.run(Path(name), asynchronous=runs % 2 == 1) == whole, ""
            except AssertionError as error:
                same, why = False, f"\n{error}"
        runs, bad = runs + 1, bad + (not same)
        kept = "the same weights and losses" if same else f"OTHER weights or losses{why}"
        print(
            f"run {runs}: {battery.restarts - before} restarts, {time.monotonic() - began:.0f} s: {kept}",
            flush=True,
        )
    print(
        f"{battery.restarts} restarts ({battery.of_launcher} of the launcher) in {runs} runs; {bad} ended otherwise"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
