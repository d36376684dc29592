"""weft's own split against equally many blocks for each process, on models whose layers are not alike.

    python -m benchmarks.balance --rounds 8 --steps 3

The README beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from statistics import geometric_mean

from benchmarks import machine
from benchmarks.balance.contenders import CONTENDERS, Task
from benchmarks.balance.models import MODELS
from benchmarks.turns import options
from benchmarks.turns.driver import compare
from benchmarks.turns.figures import figures, ratio, shown, wrong_gradients
from benchmarks.turns.samples import Record

NAMES = list(CONTENDERS)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = options.parser("benchmarks.balance", __doc__, rounds=8, steps=3)
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--pipeline", default="1f1b", help="the schedule that both run")
    given = parser.parse_args(arguments)
    given.models = options.names(parser, given.models, MODELS, "model")
    return given


def line(found: dict) -> str:
    one, equal, own = (found["contenders"][name] for name in NAMES)
    steps = " | ".join(f"{figure['step_ms']:.0f}" for figure in (one, equal, own))
    shares = " | ".join(f"{figure['step_ratio']:.3f}" for figure in (equal, own))
    kept = min(figure["kept"] for figure in (one, equal, own))
    ratio = shown(found, "ratio")
    return f"| {found['task']['model']} | {steps} | {shares} | {ratio} | {found['moved']} | {kept} of {one['steps']} |"


def moved(one: Record, other: Record) -> int:
    """How many parameters lie on another process; 0 if both cut at the same place."""
    return len({*one.plan.splitlines()} ^ {*other.plan.splitlines()})


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    print(machine.machine_name())
    print("| model | one process ms | equal ms | weft ms | equal | weft | weft to equal | moved | kept |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    rows, wrong = [], False
    for name in given.models:
        task = Task(name, given.pipeline, small=given.small)
        records = compare(NAMES, task, given.rounds, given.steps, given.patience)
        lines = {record.name: figures(record, records[0]) for record in records}
        by_name = {record.name: record for record in records}
        found, error = ratio(by_name["weft"], by_name["equal"])
        steps = {record.name: [asdict(step) for step in record.steps] for record in records}
        row = {
            "task": asdict(task),
            "ratio": found,
            "ratio_error": error,
            "moved": moved(by_name["weft"], by_name["equal"]),
            "contenders": lines,
            "steps": steps,
        }
        rows.append(row)
        print(line(row), flush=True)
        wrong = wrong_gradients(lines.values()) or wrong
    mean = geometric_mean(row["ratio"] for row in rows)
    print(f"\nweft to equal, geometric mean: {mean:.3f}")
    if given.json:
        content = {"machine": machine.machine_name(), "geometric_mean": mean, "models": rows}
        given.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
