"""What compression does to the loss: a small GPT on source text and a network on digits, three seeds.

python -m benchmarks.loss_parity
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from benchmarks.machine import machine_name


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.loss_parity", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--compressions", default="fp32,fp16,bf16,int8")
    given = parser.parse_args()
    options = ["--steps", str(given.steps), "--seeds", given.seeds, "--compressions", given.compressions]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."]), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "weft",
        "run",
        "-n",
        str(given.n),
        "benchmarks/loss_parity/train.py",
        *options,
    ]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    losses = {(row["task"], row["seed"], row["compression"]): row["loss"] for row in rows}
    print(f"{machine_name()}, {given.n} processes, {given.steps} steps")
    print("| task | seed | compression | loss | of fp32's |\n| --- | --- | --- | --- | --- |")
    for (task, seed, spec), loss in losses.items():
        print(f"| {task} | {seed} | {spec} | {loss:.5f} | {loss / losses[task, seed, 'fp32']:.4f} |")


if __name__ == "__main__":
    main()
