"""Step time of a GPT whose layers are cut over two processes: weft beside PyTorch's `parallelize_module`.

    python -m benchmarks.tensor_parallel --rounds 4 --steps 6

The README beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from benchmarks import machine
from benchmarks.contenders import SMALL
from benchmarks.tensor_parallel.contenders import CONTENDERS, Task
from benchmarks.turns import options
from benchmarks.turns.driver import compare
from benchmarks.turns.figures import by_turns, figures, ratio, shown, wrong_gradients
from benchmarks.turns.samples import Record

PEER = "parallelize-module"
TARGET = 1.0
"""Of the peer's step."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = options.parser("benchmarks.tensor_parallel", __doc__, rounds=4, steps=6)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4], help="a table for each")
    return parser.parse_args(arguments)


def compared(records: list[Record]) -> list[dict]:
    """A line for each contender, with its ratio to one process and to the peer."""
    lines = [figures(record, records[0]) for record in records]
    peer = next(record for record in records if record.name == PEER)
    for line, record in zip(lines, records, strict=True):
        line["peer_ratio"], line["peer_ratio_error"] = ratio(record, peer)
        line["peer_turns"], line["peer_turns_error"] = by_turns(record, peer)
    return lines


def table(lines: list[dict]) -> str:
    text = [
        "| contender | step ms | to one process | to the peer | by turns | processor ms | kept |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for line in lines:
        ratios = " | ".join(shown(line, name) for name in ("step_ratio", "peer_ratio", "peer_turns"))
        text.append(
            f"| {line['contender']} | {line['step_ms']:.0f} | {ratios} | {line['cpu_ms']:.0f} "
            f"| {line['kept']} of {line['steps']} |"
        )
    weft = lines[-1]
    reached = "reached" if weft["peer_ratio"] <= TARGET else "missed"
    text.append(f"\nweft: {weft['peer_ratio']:.3f} of {PEER}; target {TARGET} {reached}")
    return "\n".join(text)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    task = Task(config=SMALL) if given.small else Task()
    print(machine.machine_name())
    found, wrong = [], False
    for microbatches in given.microbatches:
        row = replace(task, microbatches=microbatches)
        lines = compared(compare(list(CONTENDERS), row, given.rounds, given.steps, given.patience))
        print(f"\n{microbatches} microbatches of {task.batch // microbatches}\n\n{table(lines)}")
        sys.stdout.flush()
        found.append({"task": asdict(row), "figures": lines})
        wrong = wrong_gradients(lines) or wrong
    if given.json:
        content = {"machine": machine.machine_name(), "rows": found}
        given.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
