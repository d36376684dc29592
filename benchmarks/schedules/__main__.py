"""Step time of all schedules on two processes, beside the best that PyTorch's own pipeline has.

    python -m benchmarks.schedules --rounds 10 --steps 3

The README beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from benchmarks import machine
from benchmarks.contenders import CONTENDERS, PEERS, SMALL, Task
from benchmarks.turns import options
from benchmarks.turns.driver import compare
from benchmarks.turns.figures import by_turns, figures, ratio, shown, wrong_gradients
from benchmarks.turns.samples import Record

YARDSTICK = "one-process"
OURS = ["weft-1f1b", "weft-interleaved_1f1b", "weft-zb_h1", "weft-zbv", "weft-auto", "weft-auto-mkl"]
MICROBATCHES = [4, 8, 16]
TARGET = 0.95
"""Of the step of the peer's best schedule, for `weft-auto`."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = options.parser("benchmarks.schedules", __doc__, rounds=10, steps=3)
    default = ",".join([*PEERS, *OURS])
    known = ", ".join(CONTENDERS)
    parser.add_argument("--contenders", default=default, help=f"comma-separated, of {known}")
    parser.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES, help="a table for each")
    given = parser.parse_args(arguments)
    found = options.names(parser, given.contenders, CONTENDERS, "contender")
    given.names = [YARDSTICK, *(name for name in found if name != YARDSTICK)]
    return given


def compared(records: list[Record]) -> list[dict]:
    """A line for each contender, with its ratio to one process and to the peer's best schedule."""
    lines = [figures(record, records[0]) for record in records]
    peers = [line for line in lines if line["contender"] in PEERS]
    if peers:
        name = min(peers, key=lambda line: line["step_ms"])["contender"]
        best = next(record for record in records if record.name == name)
        for line, record in zip(lines, records, strict=True):
            line["best_peer"] = best.name
            line["peer_ratio"], line["peer_ratio_error"] = ratio(record, best)
            line["peer_turns"], line["peer_turns_error"] = by_turns(record, best)
    return lines


def table(lines: list[dict]) -> str:
    text = [
        "| contender | step ms | to one process | to the peer's best | by turns | processor ms | kept |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for line in lines:
        one = shown(line, "step_ratio")
        peer = shown(line, "peer_ratio") if "best_peer" in line else ""
        turns = shown(line, "peer_turns") if "best_peer" in line else ""
        text.append(
            f"| {line['contender']} | {line['step_ms']:.0f} | {one} | {peer} | {turns} "
            f"| {line['cpu_ms']:.0f} | {line['kept']} of {line['steps']} |"
        )
    return "\n".join(text)


def verdict(lines: list[dict]) -> str:
    """How `weft-auto` did, if it ran beside a peer."""
    for line in lines:
        if line["contender"] == "weft-auto" and "best_peer" in line:
            reached = "reached" if line["peer_ratio"] <= TARGET else "missed"
            return (
                f"\nweft-auto: {line['peer_ratio']:.3f} of {line['best_peer']}, {line['peer_turns']:.3f} by turns; "
                f"target {TARGET} {reached}"
            )
    return ""


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    task = Task(config=SMALL) if given.small else Task()
    print(machine.machine_name())
    found, wrong = [], False
    for microbatches in given.microbatches:
        row = replace(task, microbatches=microbatches)
        records = compare(given.names, row, given.rounds, given.steps, given.patience)
        lines = compared(records)
        print(
            f"\n{microbatches} microbatches of {task.batch // microbatches}\n\n{table(lines)}{verdict(lines)}"
        )
        sys.stdout.flush()
        steps = {record.name: [asdict(step) for step in record.steps] for record in records}
        plans = {record.name: record.plan for record in records if record.plan}
        found.append({"task": asdict(row), "figures": lines, "plans": plans, "steps": steps})
        wrong = wrong_gradients(lines) or wrong
        if given.json:
            content = {"machine": machine.machine_name(), "rows": found}
            given.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
