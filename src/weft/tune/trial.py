"""Runs a real script for some steps, in processes of its own, and says how fast it was.

The job records what each step took (`weft.profiler.steps`); this process reads along and ends the job when it knows
enough.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.analysis.run import Run, Step
from weft.launch.environ import TRIAL
from weft.profiler.live.following import Follower
from weft.terminal_text import visible
from weft.tune.search import Outcome
from weft.watch.process import die_with_parent

FIRST = 2
"""The first steps trace, compare and warm up: they do not count."""
FEW = 3
"""After so many usual steps a trial that is far behind ends."""
LOOK_S = 0.1
END_S = 30.0
"""So long a job may take to end when it is asked to."""
NO_MEMORY = ("out of memory", "OutOfMemory", "Cannot allocate memory", "MemoryError")


@dataclass(frozen=True)
class Trials:
    """The way in which trials are run.

    Attributes:
        command: `weft run` with its options, up to the script.
        script: The script and its arguments.
        environ: The variables of this process.
        folder: Each trial has a folder there, by number.
        steps: Usual steps to measure.
        seconds: How long a trial may take.
    """

    command: Sequence[str]
    script: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    steps: int = 10
    seconds: float = 120.0

    def run(self, changes: Mapping[str, Any], floor: float) -> Outcome:
        """A trial; one whose rate is below `floor` (samples a second) ends early."""
        folder = self.folder / f"trial{len(list(self.folder.glob('trial*')))}"
        folder.mkdir(parents=True)
        settings = {name: value for name, value in changes.items() if not name.startswith("-")}
        settings |= {"record": str(folder), "record_steps": "none", "log_dir": str(folder / "log")}
        options = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        script = changed_arguments(self.script, changes)
        with (folder / "output").open("wb") as output:
            job = subprocess.Popen(
                [*self.command, "--quiet", *options, *script],
                env={**self.environ, TRIAL: str(folder.absolute())},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip
            try:
                return self._follow(job, folder, floor)
            finally:
                _end(job)

    def _follow(self, job: subprocess.Popen[bytes], folder: Path, floor: float) -> Outcome:
        follower, until_s = Follower(folder), time.monotonic() + self.seconds
        while True:
            ended, late = job.poll() is not None, time.monotonic() > until_s
            run = follower.look()
            found = outcome_of(run)
            if found.steps >= FEW and (outcome_of(run, max).samples_per_s or 0.0) < floor and not ended:
                return Outcome(**{**vars(found), "stopped": True})
            if found.steps >= self.steps or (found.samples_per_s and (late or job.returncode == 0)):
                return found
            if ended:
                return Outcome(failure=why(job.returncode, folder / "output"), settings=found.settings)
            if late:
                return Outcome(
                    failure=f"no more than {found.steps} usual steps in {self.seconds:g} s",
                    settings=found.settings,
                )
            time.sleep(LOOK_S)


def changed_arguments(script: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """The script's arguments with those of `changes` that begin with a dash.

    >>> changed_arguments(["train.py", "--batch", "8", "--lr=1"], {"--batch": 16, "--lr": 2, "--new": 3, "chunks": 4})
    ['train.py', '--batch', '16', '--lr=2', '--new', '3']
    """
    found = list(script)
    for name, value in changes.items():
        if not name.startswith("-"):
            continue
        for at, word in enumerate(found):
            if word == name and at + 1 < len(found):
                found[at + 1] = str(value)
                break
            if word.startswith(f"{name}="):
                found[at] = f"{name}={value}"
                break
        else:
            found += [name, str(value)]
    return found


def outcome_of(run: Run, of: Callable[[Iterable[float]], float] = statistics.median) -> Outcome:
    """The outcome of a job so far, by its usual steps: the median (`of`) of their rates and periods.

    A step's period goes from its begin to that of the next one. Of ranks with the same samples one counts: the ranks of
    a pipeline, and those that split weights.
    """
    rates: dict[int, float] = {}
    periods: list[float] = []
    steps = min((len(usual(own)) for own in run.steps.values()), default=0)
    for rank, own in run.steps.items():
        kept = usual(own)
        facts = run.facts.get(rank)
        if not kept or facts is None or facts.pp_rank != 0:
            continue
        periods.append(statistics.median(taken for _, taken in kept))
        rates[facts.rdp_rank] = of(step.samples / taken for step, taken in kept)
    settings = next((facts.settings for facts in run.facts.values()), {})
    memory = max((step.memory_bytes for own in run.steps.values() for step in own), default=0)
    whole = settings.get("tensor_parallel_degree", 1) != 1 and settings.get("cut_layers", 1) == 0
    return Outcome(
        sum(rates.values()) or None, steps, max(periods, default=0.0), memory, settings=settings,
        degrees=degrees_of(run), remark="no layer of the model can be cut" if whole else "",
    )  # fmt: skip


def degrees_of(run: Run) -> tuple[int, ...]:
    """Over how many ranks weights can be split so that a step has the same samples; none if over no other number.

    Where each rank reads its own samples (`inputs` is "per_rank"), all degrees have the same. So have replicas,
    with which it makes no difference.
    """
    facts = next(iter(run.facts.values()), None)
    if facts is None or "torch" not in facts.versions:
        return ()
    settings = facts.settings
    own, inputs = settings.get("tensor_parallel_degree", 1), settings.get("inputs", "equal")
    apart = inputs in ("per_rank", "apart") or (inputs == "equal" and own == 1)
    partitions = settings.get("partitions", 1)
    if not apart or settings.get("context_parallel_degree", 1) != 1 or type(partitions) is not int:
        return ()
    ranks = facts.ranks // partitions
    return tuple(degree for degree in range(1, ranks + 1) if ranks % degree == 0) if ranks > 1 else ()


def usual(steps: Sequence[Step]) -> list[tuple[Step, float]]:
    """Steps that train, after the first ones, of which the next one's begin is known; and how long that was."""
    found = []
    for step, after in zip(steps, steps[1:], strict=False):
        taken = after.start_s - step.start_s
        if after.step == step.step + 1 and step.step > FIRST and not step.evaluates and taken > 0:
            found.append((step, taken))
    return found


def why(code: int, output: Path) -> str:
    """Why a job ended before it was fast, in a sentence."""
    with suppress(OSError):
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - (1 << 16)))
            lines = file.read().decode("utf-8", "replace").splitlines()
        if (
            code == -signal.SIGKILL
            or code == 128 + signal.SIGKILL
            or any(sign in line for line in lines for sign in NO_MEMORY)
        ):
            return "out of memory"
        errors = [line for line in lines if line.startswith("weft") and ": " in line] or [
            line for line in lines if line.strip()
        ]
        if errors and code:
            return visible(errors[0])[:300]
    return (
        f"exit code {code}"
        if code
        else "it ended before enough steps: give it more to train on, or fewer --steps"
    )


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the job and all its processes."""
    if job.poll() is None:
        job.terminate()
        with suppress(subprocess.TimeoutExpired):
            job.wait(END_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def weft_run(options: Sequence[str]) -> list[str]:
    """`weft run` of this installation, with options."""
    return [sys.executable, "-m", "weft", "run", *options]
