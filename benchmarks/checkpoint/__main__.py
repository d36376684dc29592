"""How fast checkpoints are written and read: weft's format, torch.save, PyTorch's distributed one, and the disk itself.

python -m benchmarks.checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import machine


def table(lines: list[dict[str, object]], mib: float) -> str:
    """Medians of MiB a second, and their ratio to the disk's own."""
    rows = [
        "| who | write (MiB/s) | of the disk | read (MiB/s) | of the disk |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    rates = {}
    for line in lines:
        rates.setdefault((line["who"], line["what"]), []).append(mib / line["seconds"])
    middle = {key: statistics.median(found) for key, found in rates.items()}
    for who in dict.fromkeys(line["who"] for line in lines):
        cells = [who]
        for what in ("write", "read"):
            rate = middle.get((who, what))
            cells += ["", ""] if rate is None else [f"{rate:.0f}", f"{rate / middle['disk', what]:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def beside(lines: list[dict[str, float]]) -> str:
    """What an asynchronous save adds to the steps that run beside it."""
    middle = {name: statistics.median(line[name] for line in lines) for name in lines[0]}
    ms = {name: f"{1e3 * value:.0f} ms" for name, value in middle.items()}
    return (
        f"\nAsynchronous: {ms['alone_s']} a step without a save, {ms['beside_s']} while one is written "
        f"({middle['steps']:.0f} steps); training stands still for {ms['blocked_s']}, and a save makes it "
        f"{ms['added_s']} longer."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("-n", type=int, default=2, help="processes, which are partitions")
    parser.add_argument("--mib", type=int, default=256, help="of parameters, in layers of 4 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one by default")
    parser.add_argument("--small", action="store_true", help="16 MiB, one round: to see that it runs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.small:
        given.mib, given.rounds = 16, 1
    paths = [os.path.abspath("src"), os.getcwd()]
    environ = {
        **os.environ,
        **machine.MALLOC_SETTINGS,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-m", "weft", "run", "-n", str(given.n), "benchmarks/checkpoint/rank.py"]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = [folder, str(given.mib), str(given.rounds)]
        done = subprocess.run([*command, *options], env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    moved = [line for line in found if "who" in line]
    trained = [line for line in found if "who" not in line]
    print(f"{machine.machine_name()}, {given.n} processes, {given.mib} MiB, medians of {given.rounds}")
    print(table(moved, given.mib))
    print(beside(trained))
    if given.json:
        given.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
