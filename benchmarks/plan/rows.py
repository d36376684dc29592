"""Published step times as jobs that can be planned.

What a source does not print but its code does is stated in `SOURCES`. Rows that leave out what a step depends on (the
microbatch, the chunks, the layers) are left out, and counted.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from weft.graph.sizes import Sizes
from weft.plan.parallelism.job import Division, Job

FILE = Path("../shared/data/step_times.csv")
SCHEDULES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved_1f1b",
    "ZB-1p": "zb_h1",
    "ZB-2p": "zb_2p",
    "ZB-V": "zbv",
    "GPipe-uniform": "gpipe",
}
SHARDED = {"ZeRO-1": "optimizer", "ZeRO-3": "parameters", "FSDP full": "parameters", "FSDP2": "parameters"}
RECOMPUTE = {
    "full": "full",
    "selective": "selective",
    "selective+seqpar": "selective",
    "per-op SAC": "selective",
}
PEAK_OF_MFU = 989e12
"""The peak that the sources with H100s divide by to get their MFU."""


@dataclass(frozen=True)
class Source:
    """What a source's code does.

    Attributes:
        fused: Whether attention is fused.
        gradient_bytes: Of a gradient as replicas exchange it.
        sharded: What replicas share, where the table does not say.
        gated: Whether feed-forward layers have a gate, by the beginning of the model's name.
        along: Whether tensor-parallel ranks split the sequence, where the table does not say.
        scattered: Whether they send only their part to the next stage.
        network: The hosts' network, where it is not the usual one: a share of that.
        hides: Whether sums run beside computation, as far as the machine's file says.
        eager: Whether operations between products are kernels of their own.
        attention_share: What its attention reaches of the peak, where it is not what the machine's file says.
    """

    fused: bool
    gradient_bytes: int = 4
    sharded: str = "none"
    gated: str = "Llama"
    along: bool = True
    scattered: bool = True
    network: float = 1.0
    hides: bool = True
    eager: bool = False
    attention_share: float | None = None


SOURCES = {
    "korthikanti": Source(fused=False, along=False),
    "zero_bubble": Source(fused=False),
    "bigscience": Source(fused=False, along=False, scattered=False, network=0.25),
    "megatron_sc21_zero3": Source(fused=False, gradient_bytes=2),
    "mpt": Source(fused=True, gradient_bytes=2, attention_share=0.173),  # a kernel of 2023, as fitted on A100
    "dgxc": Source(fused=True, gradient_bytes=2, sharded="optimizer"),
    "nanotron": Source(fused=True, hides=False, eager=True),
    "torchtitan": Source(fused=True, gradient_bytes=4),
    "alpa": Source(fused=False, gradient_bytes=2, along=False),
    "megatron_sc21": Source(fused=False, along=False),
    "megatron_sc21_ptd": Source(fused=False, along=False),
}
PRECISIONS = ("fp16", "bf16", "fp8")
"""Of products, as the file's `prec` begins: `fp16/bf16`, `fp8-cs`."""
HOSTS = {
    "A100-80": "A100-80",
    "A100-40": "A100-40",
    "H100-80": "H100",
    "H100-96GB-500W": "H100-96-500W",
    "V100-16": "V100-16",
}
"""Devices as the file names them, and as weft does."""


@dataclass(frozen=True)
class Row:
    """One published step.

    Attributes:
        group: The source, the device and the dtype.
        name: What tells it from the others.
        device: The accelerator's name.
        gpus: How many.
        per_host: How many a host has.
        job: What is trained.
        division: How.
        step_s: What was measured.
        memory_bytes: The peak that was measured on the fullest rank; 0 if none was.
        source: What its code does.
    """

    group: str
    name: str
    device: str
    gpus: int
    per_host: int
    job: Job
    division: Division
    step_s: float
    memory_bytes: float
    source: Source


def read(path: Path = FILE) -> tuple[list[Row], int]:
    """The rows that state everything, and how many do not.

    Raises:
        ValueError: A row has a source or a precision that nobody knows.
    """
    with path.open(encoding="utf-8") as file:
        given = list(csv.DictReader(file))
    found = [row for one in given if (row := _row(one)) is not None]
    return found, len(given) - len(found)


def _row(given: dict[str, str]) -> Row | None:
    needed = ("layers", "hidden", "heads", "seq", "tp", "pp", "mbs", "gbs")
    chunks = given["vp"] or ("2" if given["sched"] == "ZB-V" else "1")
    if given["set"] == "alpa":
        given["mbs"] = "4"  # four microbatches of a replica's 16 sequences
    device = given["gpu"].split(" ")[0]
    if device not in HOSTS or any(not given[name] for name in needed):
        return None
    if given["sched"] == "1F1B-I" and chunks == "1":
        return None
    source = SOURCES.get(given["set"])
    if source is None:
        raise ValueError(f'SOURCES does not say what the code of "{given["set"]}" does: add it there')
    hidden, heads = int(given["hidden"]), int(given["heads"])
    gated = given["model"].startswith(source.gated)
    vocab = 51200 if given["vocab"] in ("", "?") else int(given["vocab"])
    sizes = Sizes(
        int(given["layers"]), hidden, heads, int(given["ffn"] or 4 * hidden), vocab, int(given["seq"]),
        kv_heads=int(given["kv"] or heads), gated=gated, tied=not gated,
    )  # fmt: skip
    precision = re.split("[/-]", given["prec"])[0]
    if precision not in PRECISIONS:
        raise ValueError(f'"{given["prec"]}" of {given["set"]} begins with none of {", ".join(PRECISIONS)}')
    job = Job(
        sizes,
        int(given["gbs"]),
        precision,
        fused_attention=source.fused,
        gradient_bytes=source.gradient_bytes,
        eager=source.eager,
        scatters=True,
    )
    data, tensor = int(given["dp"] or 1), int(given["tp"])
    division = Division(
        data, tensor, int(given["pp"]), int(chunks), int(given["cp"] or 1),
        SHARDED.get(given["shard"], source.sharded), SCHEDULES.get(given["sched"], "1f1b"),
        int(given["mbs"]), RECOMPUTE.get(given["recompute"], "none"),
        source.along or "seqpar" in given["recompute"], source.scattered,
    )  # fmt: skip
    if job.batch % (data * division.microbatch):
        return None
    gpus = int(given["gpus"])
    step_s = float(given["step_s"] or 0)
    if not step_s and given["mfu"]:
        step_s = job.sizes.model_flops(job.batch) / (gpus * PEAK_OF_MFU * float(given["mfu"]))
    name = f"{given['model']}, {gpus} GPUs, {division}, batch {job.batch}, seq {sizes.seq}"
    return Row(
        f"{given['set']} {device} {precision}",
        name,
        device,
        gpus,
        int(given["node"] or 8),
        job,
        division,
        step_s,
        1e9 * float(given["mem_gb"] or 0),
        source,
    )
