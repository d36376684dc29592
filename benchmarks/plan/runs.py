"""Jobs of weft's own that a plan is compared with: a model, a division, and what its ranks measured.

    weft run -n N -m benchmarks.plan.trainee TASK FOLDER        each rank writes rankR.json

`trainee.py` is what a rank does. The models are those of `benchmarks/balance`, and the GPT of `benchmarks/schedules`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.balance.models import MODELS
from benchmarks.contenders import SMALL as SMALL_GPT
from benchmarks.contenders import Task as GPTTask
from benchmarks.gpt import GPTConfig
from weft.graph.model import Graph
from weft.graph.sizes import Sizes
from weft.plan.parallelism.job import Division
from weft.plan.parallelism.supported_layouts import settings

NAMES = ("gpt", *MODELS)
BATCH = 16
TIMEOUT_S = 240.0
LEAN = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Task:
    """What the ranks do.

    Attributes:
        model: One of `NAMES`.
        small: Tiny, only to see that it runs.
        microbatches: Of each replica.
        replicas: How many share the batch.
        recompute: Whether blocks are computed again.
        steps: Steps that count.
        trace: Whether each rank traces the model by itself, all at once, in place of training.
        lean: Whether freed memory goes back to the system at once, so that what is resident is what is in use. Steps
            take half as long again then.
        blocks: How many blocks the GPT has; as many as always if 0.
    """

    model: str
    small: bool = False
    microbatches: int = 1
    replicas: int = 1
    recompute: bool = False
    steps: int = 8
    trace: bool = False
    lean: bool = False
    blocks: int = 0

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Task:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Measured:
    """What a job measured.

    Attributes:
        steps: Of each, the seconds of the slowest rank, and how many cores others used meanwhile.
        memory_bytes: Of each rank, the peak of resident memory in usual steps above what was resident before the model
            was built.
        parameter_bytes: Of each rank.
    """

    steps: list[tuple[float, float]]
    memory_bytes: list[int]
    parameter_bytes: list[int]


def typical_s(steps: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """The median of the steps that nobody else disturbed, and how many those are; of all if none is.

    >>> typical_s([(1.0, 0.1), (1.2, 0.0), (9.0, 0.7)])
    (1.1, 2)
    >>> typical_s([(9.0, 0.7)])
    (9.0, 0)
    """
    quiet = [seconds for seconds, others in steps if others <= machine.QUIET_CORES]
    return median(quiet or [seconds for seconds, _ in steps]), len(quiet)


def task_of(
    model: str, division: Division, microbatches: int, small: bool, steps: int, lean: bool = False
) -> Task:
    """The task that runs a division."""
    return Task(model, small, microbatches, division.data, division.recompute == "full", steps, lean=lean)


def run(task: Task, division: Division, **more: Any) -> Measured | str:
    """Train by a division, with the settings that a plan writes and `more` of them; or why that failed, in a line."""
    chosen: dict[str, Any] = settings(division, task.microbatches) | more
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as folder:
        failure = _start(task, division.ranks, chosen, folder)
        if failure:
            return failure
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(division.ranks)]
    steps = []
    for number, took in enumerate(zip(*(each["steps_s"] for each in ranks), strict=True)):
        own_s = sum(each["own_s"][number] for each in ranks)
        others = [(each["busy_s"][number] - own_s) / took_s for each, took_s in zip(ranks, took, strict=True)]
        steps.append((max(took), min(others)))
    return Measured(
        steps,
        [each["memory_bytes"] for each in ranks],
        [each["parameter_bytes"] for each in ranks],
    )


def traced(model: str, microbatches: int, ranks: int, small: bool) -> Graph:
    """The graph of a model with microbatches so large, traced by so many processes at once, as they will train."""
    task = Task(model, small, microbatches, trace=True)
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as folder:
        failure = _start(task, ranks, {}, folder)
        if failure:
            raise SystemExit(f"{model} could not be traced: {failure}")
        return Graph.from_json(Path(folder, "rank0.json").read_text())


def _start(task: Task, ranks: int, chosen: dict[str, Any], folder: str) -> str:
    options = [f"--set={name}={json.dumps(value)}" for name, value in chosen.items()]
    command = [sys.executable, "-m", "weft", "run", "-n", str(ranks), "--quiet", *options]
    memory = LEAN if task.lean else machine.MALLOC_SETTINGS
    try:
        done = subprocess.run(
            [*command, "-m", "benchmarks.plan.trainee", task.to_text(), folder],
            env={**os.environ, **memory, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S:g} s"
    if not done.returncode:
        return ""
    told = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line]
    return (told or done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1][:200]


def gpt_config(small: bool, blocks: int = 0) -> GPTConfig:
    """The GPT of `benchmarks/schedules`, or one with so many blocks."""
    config = SMALL_GPT if small else GPTTask().config
    return replace(config, blocks=blocks or config.blocks)


def gpt_sizes(small: bool, blocks: int = 0) -> Sizes:
    """The same by its sizes."""
    config = gpt_config(small, blocks)
    return Sizes(
        config.blocks,
        config.width,
        config.heads,
        4 * config.width,
        config.vocabulary,
        config.context,
        tied=False,
    )
