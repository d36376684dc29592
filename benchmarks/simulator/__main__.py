"""Predicted against measured step time, for all schedules.

    python -m benchmarks.simulator --rounds 10 --steps 3

The README beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from statistics import mean, median

from benchmarks import machine
from benchmarks.contenders import SMALL
from benchmarks.simulator.contenders import Task
from benchmarks.turns import options
from benchmarks.turns.driver import Pace, compare, started
from benchmarks.turns.figures import figures, wrong_gradients
from weft.schedule import CHUNKS

YARDSTICK = "one-process"
MICROBATCHES = [4, 8, 16]
MEAN_TARGET, LARGEST_TARGET = 5.0, 10.0
"""Of the error, in percent."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = options.parser("benchmarks.simulator", __doc__, rounds=10, steps=3)
    known = ",".join(CHUNKS)
    parser.add_argument("--schedules", default=known, help=f"comma-separated, of {known}")
    parser.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES)
    given = parser.parse_args(arguments)
    given.schedules = options.names(parser, given.schedules, CHUNKS, "schedule")
    return given


def measure(task: Task, given: argparse.Namespace) -> tuple[list[dict], bool]:
    """A line for each schedule, and whether gradients were wrong. What is predicted is predicted anew in each round."""
    predicted: list[tuple[float, dict[str, float]]] = []

    def predict(pace: Pace) -> None:
        left_s = given.patience - machine.wait_until_quiet(given.patience)
        for _ in range(given.steps):
            left_s -= pace.wait(predictor, left_s)
            found = predictor.ask("call", "predictions", given.schedules)[0]
            predicted.append((pace.of(predictor), found))
        predictor.rest()

    names = [YARDSTICK, *(f"weft-{name}" for name in given.schedules)]
    with started(["predictor"], task) as [predictor]:
        predictor.rest()
        records = compare(names, task, given.rounds, given.steps, given.patience, after_round=predict)
    full_s = machine.STEADY * records[0].best_pace_s
    kept = [found for pace_s, found in predicted if pace_s <= full_s] or [found for _, found in predicted]
    lines = []
    rows = [figures(record, records[0]) for record in records]
    for name, row, record in zip(given.schedules, rows[1:], records[1:], strict=True):
        predictions_ms = [found[name] * 1e3 for found in kept]
        predicted_ms = median(predictions_ms)
        line = {
            "microbatches": task.microbatches,
            "schedule": name,
            "predicted_ms": predicted_ms,
            "measured_ms": row["step_ms"],
            "error_percent": 100 * (predicted_ms / row["step_ms"] - 1),
            "kept": row["kept"],
            "predictions_ms": predictions_ms,
            "steps": [asdict(step) for step in record.steps],
        }
        lines.append(line)
    return lines, wrong_gradients(rows)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    print(machine.machine_name())
    print("| microbatches | schedule | predicted ms | measured ms | error | kept |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |", flush=True)
    found: list[dict] = []
    wrong = False
    for microbatches in given.microbatches:
        task = Task(config=SMALL) if given.small else Task()
        lines, bad = measure(replace(task, microbatches=microbatches), given)
        found += lines
        wrong = wrong or bad
        for line in lines:
            times = f"{line['predicted_ms']:.0f} | {line['measured_ms']:.0f} | {line['error_percent']:+.1f} %"
            kept = f"{line['kept']} of {len(line['steps'])}"
            print(f"| {microbatches} | {line['schedule']} | {times} | {kept} |", flush=True)
    errors = [abs(line["error_percent"]) for line in found]
    print(f"\nmean error {mean(errors):.1f} % (target {MEAN_TARGET:g}), ", end="")
    print(f"largest {max(errors):.1f} % (target {LARGEST_TARGET:g})")
    if given.json:
        content = {"mean_percent": mean(errors), "largest_percent": max(errors), "lines": found}
        given.json.write_text(json.dumps({"machine": machine.machine_name(), **content}, indent=1), "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
