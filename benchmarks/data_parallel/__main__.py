"""Step time of replicas that average their gradients: weft beside PyTorch's DDP over gloo, on one machine.

    python -m benchmarks.data_parallel --ranks 2 --rounds 10 --steps 3

The README beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from benchmarks import machine
from benchmarks.data_parallel.contenders import CONTENDERS, SMALL, Task
from benchmarks.turns import options
from benchmarks.turns.driver import compare
from benchmarks.turns.figures import figures, shown, wrong_gradients

YARDSTICK = "ddp"
TARGET = 0.95


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = options.parser("benchmarks.data_parallel", __doc__, rounds=10, steps=3)
    known = ", ".join(CONTENDERS)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"comma-separated, of {known}")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each contender")
    given = parser.parse_args(arguments)
    if given.ranks < 2:
        parser.error(f"--ranks is {given.ranks}: at least 2 processes have something to average")
    found = options.names(parser, given.contenders, CONTENDERS, "contender")
    given.names = [YARDSTICK, *(name for name in found if name != YARDSTICK)]
    return given


def table(rows: list[dict]) -> str:
    lines = [
        "| contender | step ms | ratio | by turns | processor ms | ratio | MiB above model | kept |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        memory = " + ".join(f"{value:.0f}" for value in row["memory_mib"])
        ratio = shown(row, "step_ratio")
        turns = shown(row, "turns_ratio")
        lines.append(
            f"| {row['contender']} | {row['step_ms']:.0f} | {ratio} | {turns} | {row['cpu_ms']:.0f} "
            f"| {row['cpu_ratio']:.3f} | {memory} | {row['kept']} of {row['steps']} |"
        )
    return "\n".join(lines)


def verdict(rows: list[dict]) -> str:
    """weft's best against the target."""
    own = [row for row in rows if row["contender"].startswith("weft")]
    if not own:
        return ""
    best = min(own, key=lambda row: row["step_ratio"])
    reached = "reached" if best["step_ratio"] <= TARGET else "missed"
    return (
        f"\n{best['contender']}: {best['step_ratio']:.3f} of {YARDSTICK}, {best['turns_ratio']:.3f} by turns; "
        f"target {TARGET} {reached}"
    )


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    task = Task(given.ranks, given.ranks * 4, SMALL) if given.small else Task(given.ranks, given.ranks * 4)
    records = compare(given.names, task, given.rounds, given.steps, given.patience)
    rows = [figures(record, records[0]) for record in records]
    print(machine.machine_name())
    print(table(rows) + verdict(rows))
    if given.json:
        steps = {record.name: [asdict(step) for step in record.steps] for record in records}
        found = {"machine": machine.machine_name(), "task": asdict(task), "figures": rows, "steps": steps}
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 1 if wrong_gradients(rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
