"""What weft costs where it has nothing to split: one process and one partition against a plain loop.

    python -m benchmarks.overhead --rounds 10 --steps 3

On the CPU each contender is a process of its own; on a GPU they share one, see ``on_gpu.py``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks import machine
from benchmarks.contenders import SMALL, Task
from benchmarks.overhead import on_gpu
from benchmarks.overhead.on_gpu import MICROBATCHES, TARGET
from benchmarks.turns import options
from benchmarks.turns.driver import compare
from benchmarks.turns.figures import figures, shown, wrong_gradients

NAMES = ["one-process", "one-process-again", "weft-alone"]


def on_cpu(given: Any) -> list[dict]:
    task = Task(config=SMALL, microbatches=MICROBATCHES) if given.small else Task(microbatches=MICROBATCHES)
    records = compare(NAMES, task, given.rounds, given.steps, given.patience)
    rows = [figures(record, records[0]) for record in records]
    print("| on the CPU | step ms | ratio | processor ratio | kept |\n| --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        ratio = shown(row, "step_ratio")
        kept = f"{row['kept']} of {row['steps']}"
        print(f"| {row['contender']} | {row['step_ms']:.0f} | {ratio} | {row['cpu_ratio']:.3f} | {kept} |")
    found = rows[-1]["step_ratio"]
    print(
        f"\nweft-alone: {found:.3f} of one process; target {TARGET} {'reached' if found <= TARGET else 'missed'}"
    )
    return rows


def main(arguments: list[str]) -> int:
    parser = options.parser("benchmarks.overhead", __doc__, rounds=10, steps=3)
    given = parser.parse_args(arguments)
    print(machine.machine_name())
    rows = on_cpu(given)
    found = {"cpu": rows, "gpu": on_gpu.table(given.rounds * given.steps)}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 1 if wrong_gradients(rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
