"""Runs all contenders in turn, and prints two tables: steps of three models, and the sum of 32 MiB.

python -m benchmarks.tensorflow [--rounds 3] [--steps 10] [--models gpt128,gpt256,cnn]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

ALONE = ["one process, whole batch, 2 threads", "one process, 2 threads", "one process, 1 thread"]
TWINS = "two times one process, 1 thread"
"""Both at once, on a core each, as the ranks of a pipeline are: cores of one machine slow each other down."""
SPLIT = ["weft graph", "weft eager"]
SERVERS = "tf.distribute.Server"
IDEAL = 5 / 8
"""Of the time of one process with one thread beside another one: 4 microbatches on 2 ranks take 5 of 8 slots."""
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def took(command: Sequence[str], processes: int = 1, timeout: float = 400) -> float:
    """What rank 0 of a job of ``processes`` says that it took, in ms; no number where it fails."""
    jobs = []
    for rank in range(processes):
        env = {**os.environ, **QUIET, "RANK": str(rank)}
        jobs.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    try:
        text = jobs[0].communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        text = ""
    for job in jobs:
        if not text:
            job.kill()
        job.wait()
    return next((float(line[5:]) for line in text.splitlines() if line.startswith("TOOK ")), float("nan"))


def one(contender: str, model: str, steps: int) -> float:
    """One run of a contender."""
    if contender == SERVERS:
        return took(["-m", "benchmarks.tensorflow.servers", model, str(steps)])
    launch = ["-m", "weft", "run", "-n", "2", "--quiet"] if contender in SPLIT else []
    worker = "benchmarks/tensorflow/worker.py"
    if contender == TWINS:
        return took([worker, ALONE[-1], model, str(steps)], processes=2)
    return took([*launch, worker, contender, model, str(steps)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", default="gpt128,gpt256,cnn")
    options = parser.parse_args()
    models = options.models.split(",")
    contenders = [*ALONE, TWINS, *SPLIT, SERVERS]
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for model in models:
            for contender in contenders:
                found.setdefault((contender, model), []).append(one(contender, model, options.steps))
                print(
                    f"{model:8} {contender:40} {found[contender, model][-1]:8.1f} ms",
                    file=sys.stderr,
                    flush=True,
                )
    print("| ms a step | " + " | ".join(models) + " |")
    print("| --- |" + " --- |" * len(models))
    best = {key: statistics.median(values) for key, values in found.items()}
    for contender in contenders:
        cells = []
        for model in models:
            ideal = IDEAL * best[TWINS, model]
            cells.append(f"{best[contender, model]:.0f} ({best[contender, model] / ideal:.2f} of the ideal)")
        print(f"| {contender} | " + " | ".join(cells) + " |")
    sums: dict[str, list[float]] = {"weft": [], "MultiWorkerMirroredStrategy": []}
    for _ in range(options.rounds):
        sums["weft"].append(
            took(
                [
                    "-m",
                    "weft",
                    "run",
                    "-n",
                    "2",
                    "--quiet",
                    "benchmarks/tensorflow/collective.py",
                    "weft",
                    "20",
                ]
            )
        )
        sums["MultiWorkerMirroredStrategy"].append(
            took(["-m", "benchmarks.tensorflow.collective", "tf", "20"], 2)
        )
    print("\n| sum of 32 MiB over two processes | ms |\n| --- | --- |")
    for name, values in sums.items():
        print(f"| {name} | {statistics.median(values):.1f} |")
    ratio = statistics.median(sums["weft"]) / statistics.median(sums["MultiWorkerMirroredStrategy"])
    print(f"| ratio | {ratio:.2f} |")


if __name__ == "__main__":
    main()
