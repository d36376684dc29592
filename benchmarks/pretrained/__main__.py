"""The memory that a rank takes from `from_pretrained` to the first step, beside what it owns of the model.

python -m benchmarks.pretrained
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import machine


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.pretrained", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--gib", type=float, default=2.0, help="of weights, in float32")
    parser.add_argument("--width", type=int, default=2048, help="of the model")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    given = parser.parse_args()
    print(machine.machine_name(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write(folder, given.gib, given.width)
        whole = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 2 / 2**20
        print(f"\n{whole:.0f} MiB in bfloat16, converted from float32\n")
        print("| ranks | from_pretrained | owns at most MiB | peak MiB | after the first step MiB |")
        print("| ---: | --- | ---: | ---: | ---: |")
        for ranks in given.ranks:
            for name in ("as it is", "delayed"):
                found = run(folder, ranks, name == "delayed")
                figures = [max(each[key] for each in found) for key in ("own", "peak", "after")]
                print(
                    f"| {ranks} | {name} | " + " | ".join(f"{each:.0f}" for each in figures) + " |",
                    flush=True,
                )


def write(folder: str, gib: float, width: int) -> None:
    """A Llama of so many GiB with made weights, and at least four layers."""
    program = (
        "import sys, torch, transformers as T; width, layers = map(int, sys.argv[2:]); "
        "config = T.LlamaConfig(hidden_size=width, intermediate_size=width * 11 // 4, num_attention_heads=16, "
        "vocab_size=16384, num_hidden_layers=layers); "
        "T.LlamaForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size='1GB')"
    )
    layers = max(4, round(gib * 2**30 / (4 * (4 + 3 * 11 / 4) * width**2)))
    command = [sys.executable, "-c", program, folder, str(width), str(layers)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def run(folder: str, ranks: int, delayed: bool) -> list[dict[str, float]]:
    """The figures of each rank."""
    command = [
        "weft",
        "run",
        "-n",
        str(ranks),
        "--quiet",
        "-m",
        "benchmarks.pretrained.rank",
        folder,
        *["delayed"] * delayed,
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return [
        json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line
    ]


if __name__ == "__main__":
    main()
