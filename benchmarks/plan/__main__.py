"""Predicted against published step times and peaks of memory: a line for each row, and what remains of the errors."""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.plan.rows import FILE, HOSTS, Row, read
from weft.machines.catalogue import host_of
from weft.machines.host import Machines
from weft.plan.parallelism.memory import memory_of
from weft.plan.parallelism.step import step_of
from weft.topology.cluster import Link

FITTED: dict[str, tuple[tuple[str, ...], ...]] = {
    "A100-80": (
        ("korthikanti", "1T", "selective"),
        ("korthikanti", "2240 GPUs"),
        ("zero_bubble", "6.2B, 8 GPUs", "1f1b", "batch 192"),
        ("bigscience", "203B"),
        ("mpt A100-80", "7b"),
    ),
    "H100-80": (
        ("dgxc", "bf16", "175B, 512"),
        ("dgxc", "bf16", "8B, 32"),
        ("dgxc", "bf16", "340B, 512"),
        ("dgxc", "bf16", "70B, 256"),
        ("dgxc", "fp8", "340B, 256"),
    ),
    "H100-96GB-500W": (
        ("torchtitan", "bf16", "128 GPUs"),
        ("torchtitan", "bf16", "70B"),
        ("torchtitan", "fp8", "8B, 8 GPUs", "microbatch 2"),
        ("torchtitan", "fp8", "8B", "seq 32768"),
        ("torchtitan", "fp8", "70B", "19.764"),
    ),
}
"""The rows that machines were fitted on, by words of their names."""
STRICT = ("korthikanti", "dgxc H100-80 bf16")


def predicted_s(row: Row) -> float:
    """The step that `weft plan` predicts for a row, in seconds."""
    host, source = host_of(HOSTS[row.device], min(row.per_host, row.gpus)), row.source
    network = Link(host.network.latency_s, host.network.bytes_per_s * source.network)
    conduct = host.conduct if source.hides else replace(host.conduct, tensor=0.0, data=0.0)
    share = source.attention_share or host.accelerator.attention_share
    device = replace(host.accelerator, attention_share=share)
    machines = Machines(
        replace(host, network=network, conduct=conduct, accelerator=device),
        max(1, row.gpus // host.accelerators),
    )
    return step_of(row.job, row.division, machines).seconds


def fitted(row: Row) -> bool:
    """Whether a machine was fitted on a row."""
    text = f"{row.group} {row.name} {row.step_s:.3f}"
    return any(all(word in text for word in words) for words in FITTED.get(row.device, ()))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: the correlation of the places that both have in order; equal values share their mean place.

    >>> rank_correlation([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)])
    0.5
    """
    first, second = (_places([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) - 1) / 2
    product = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    sizes = [math.sqrt(sum((a - mean) ** 2 for a in places)) for places in (first, second)]
    return product / (sizes[0] * sizes[1]) if all(sizes) else 0.0


def _places(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines of a table: mean and largest error of each group, of the strict ones and of the rest."""
    strict = [row for row in rows if row.group.startswith(STRICT)]
    rest = [row for row in rows if not row.group.startswith(STRICT)]
    groups = {**grouped(rows, lambda row: row.group), "**strict**": strict, "**rest**": rest}
    lines = [
        "| rows | number | mean error | of those not fitted | largest | bias |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, members in ((name, members) for name, members in groups.items() if members):
        errors = [predicted_s(row) / row.step_s - 1 for row in members]
        unseen = [abs(error) for row, error in zip(members, errors, strict=True) if not fitted(row)]
        sizes = [abs(error) for error in errors]
        lines.append(
            f"| {name} | {len(members)} | {statistics.mean(sizes):.1%} | {statistics.mean(unseen or sizes):.1%} | "
            f"{max(sizes):.1%} | {statistics.mean(errors):+.1%} |"
        )
    return lines


def orders(rows: Sequence[Row]) -> list[str]:
    """Lines of a table: the rank correlation of each model and number of GPUs with at least three rows."""
    lines = ["| rows of one model | number | rank correlation |", "| --- | ---: | ---: |"]
    groups = grouped(rows, lambda row: f"{row.group}, {row.name.split(',')[0]}, {row.gpus} GPUs")
    for name, members in groups.items():
        if len(members) >= 3:
            found = rank_correlation([(predicted_s(row), row.step_s) for row in members])
            lines.append(f"| {name} | {len(members)} | {found:.3f} |")
    return lines


def memories(rows: Sequence[Row]) -> list[str]:
    """Lines of a table: predicted against published peaks of memory."""
    lines = [
        "| rows that state a peak of memory | number | mean error | largest | bias |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, members in grouped([row for row in rows if row.memory_bytes], lambda row: row.group).items():
        errors = [memory_of(row.job, row.division).total / row.memory_bytes - 1 for row in members]
        sizes = [abs(error) for error in errors]
        lines.append(
            f"| {name} | {len(members)} | {statistics.mean(sizes):.0%} | {max(sizes):.0%} | "
            f"{statistics.mean(errors):+.0%} |"
        )
    return lines


def every(rows: Sequence[Row]) -> list[str]:
    """Lines of a table: each row with its error; `*` marks those that were fitted on."""
    lines = ["| rows | division | predicted s | published s | error |", "| --- | --- | ---: | ---: | ---: |"]
    for row in rows:
        step_s = predicted_s(row)
        mark = " *" if fitted(row) else ""
        lines.append(
            f"| {row.group} | {row.name} | {step_s:.3f} | {row.step_s:.3f} | {step_s / row.step_s - 1:+.1%}{mark} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--rows", type=Path, default=FILE, help=f"the published step times (default: {FILE})")
    parser.add_argument("--brief", action="store_true", help="leave out the table of all rows")
    options = parser.parse_args()
    rows, without = read(options.rows)
    print(f"{len(rows)} rows; {without} more leave out what a step depends on\n")
    tables = [summary(rows), orders(rows), memories(rows)] + ([] if options.brief else [every(rows)])
    print("\n\n".join("\n".join(table) for table in tables))


if __name__ == "__main__":
    main()
