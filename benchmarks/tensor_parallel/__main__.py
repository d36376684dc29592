"""Step time of a GPT whose layers are cut over processes: weft beside PyTorch's `parallelize_module`, and hybrids.

    python -m benchmarks.tensor_parallel --rounds 4 --steps 6
    python -m benchmarks.tensor_parallel --ranks 4

The README beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from benchmarks import machine
from benchmarks.contenders import SMALL
from benchmarks.tensor_parallel.contenders import Task
from benchmarks.turns import options
from benchmarks.turns.driver import compare
from benchmarks.turns.figures import by_turns, figures, ratio, shown, wrong_gradients
from benchmarks.turns.samples import Record

CONTENDERS = {
    2: ("one-process", "parallelize-module", "weft", "weft-sequence"),
    4: ("one-process", "partitions-4", "tensor-2-partitions-2", "tensor-2-replicas-2"),
}
"""By the number of processes; the second one is the peer."""
MICROBATCHES = {2: [1, 4], 4: [8]}
TARGET = 1.0
"""Of the step of `parallelize_module`."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = options.parser("benchmarks.tensor_parallel", __doc__, rounds=4, steps=6)
    parser.add_argument(
        "--ranks", type=int, choices=CONTENDERS, default=2, help="processes: 4 are for hybrids"
    )
    parser.add_argument(
        "--microbatches", type=int, nargs="+", help="a table for each; 1 and 4, or 8 with 4 ranks"
    )
    given = parser.parse_args(arguments)
    given.microbatches = given.microbatches or MICROBATCHES[given.ranks]
    return given


def compared(records: list[Record]) -> list[dict]:
    """A line for each contender, with its ratio to one process and to the peer."""
    lines = [figures(record, records[0]) for record in records]
    peer = records[1]
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
    return "\n".join(text)


def verdict(lines: list[dict]) -> str:
    """weft against its target, where there is one."""
    weft = next((line for line in lines if line["contender"] == "weft"), None)
    if weft is None:
        return ""
    reached = "reached" if weft["peer_ratio"] <= TARGET else "missed"
    return f"\n\nweft: {weft['peer_ratio']:.3f} of {lines[1]['contender']}; target {TARGET} {reached}"


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    task = Task(config=SMALL) if given.small else Task()
    print(machine.machine_name())
    found, wrong = [], False
    for microbatches in given.microbatches:
        row = replace(task, microbatches=microbatches)
        lines = compared(
            compare(list(CONTENDERS[given.ranks]), row, given.rounds, given.steps, given.patience)
        )
        print(
            f"\n{microbatches} microbatches of {task.batch // microbatches}\n\n{table(lines)}{verdict(lines)}"
        )
        sys.stdout.flush()
        found.append({"task": asdict(row), "figures": lines})
        wrong = wrong_gradients(lines) or wrong
    if given.json:
        content = {"machine": machine.machine_name(), "rows": found}
        given.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
