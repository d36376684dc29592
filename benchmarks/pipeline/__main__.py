"""Step time, processor time and memory of a pipeline on two processes: weft, its peer, and one process.

    python -m benchmarks.pipeline --rounds 10 --steps 3

The README beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from benchmarks import machine
from benchmarks.contenders import CONTENDERS, PEERS, SMALL, Task
from benchmarks.turns import options
from benchmarks.turns.driver import compare
from benchmarks.turns.figures import figures, shown, wrong_gradients

YARDSTICK = "one-process"
DEFAULT = ",".join([YARDSTICK, *PEERS, "weft", "weft-gpipe", "weft-memory"])


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = options.parser("benchmarks.pipeline", __doc__, rounds=10, steps=3)
    known = ", ".join(CONTENDERS)
    parser.add_argument("--contenders", default=DEFAULT, help=f"comma-separated, of {known}")
    given = parser.parse_args(arguments)
    found = options.names(parser, given.contenders, CONTENDERS, "contender")
    given.names = [YARDSTICK, *(name for name in found if name != YARDSTICK)]
    return given


def table(rows: list[dict]) -> str:
    columns = "contender | step ms | ratio | processor ms | ratio | MiB above model | first step ms | kept"
    lines = [f"| {columns} |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        memory = " + ".join(f"{value:.0f}" for value in row["memory_mib"])
        first = f"{row['first_step_ms']:.0f}" + ("" if row["first_step_quiet"] else " (disturbed)")
        ratio = shown(row, "step_ratio")
        lines.append(
            f"| {row['contender']} | {row['step_ms']:.0f} | {ratio} | {row['cpu_ms']:.0f} "
            f"| {row['cpu_ratio']:.3f} | {memory} | {first} | {row['kept']} of {row['steps']} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    task = Task(config=SMALL) if given.small else Task()
    records = compare(given.names, task, given.rounds, given.steps, given.patience)
    rows = [figures(record, records[0]) for record in records]
    print(machine.machine_name())
    print(table(rows))
    if given.json:
        steps = {record.name: [asdict(step) for step in record.steps] for record in records}
        found = {"machine": machine.machine_name(), "task": asdict(task), "figures": rows, "steps": steps}
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 1 if wrong_gradients(rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
