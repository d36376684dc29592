"""The page of `weft plan --html`: the answer as the value that the page is made of."""

from __future__ import annotations

from weft.cli.plan.text import (
    assumptions,
    guide_table,
    kinds_table,
    nothing_fits,
    others,
    plans_table,
    question,
    sentence,
    storage,
    terms,
    today,
)
from weft.machines.host import Machines
from weft.plan.parallelism.answer import Answer, Asked
from weft.plan.parallelism.job import Job
from weft.plan.parallelism.memory import LOST, RESERVED
from weft.plan.parallelism.stage_costs import stage_costs
from weft.plan.parallelism.supported_layouts import command, settings
from weft.report.plan.page import PlanReport, ToWrite
from weft.report.plan.pipeline import pipeline
from weft.report.run.labels import Table
from weft.topology.cluster import Link
from weft.units import format_bytes, format_seconds

HOW_RIGHT = (
    "Against 242 published steps, with machines fitted on five rows each: 2.5 % in the mean and 6.2 % at most on "
    "Korthikanti's rows and NVIDIA's dense rows in bf16, 6.9 % in the mean on all others.",
    "V100, H200, B200, L4, T4 and CPUs are not fitted: take their times as ratios.",
    "Memory: against peaks that were published, 16 % in the mean, 10 % for BigScience's runs in fp16, 13 % for "
    "zero bubble's, 20 to 40 % for others.",
    "What is not counted: fragmentation beyond 4 %, and buffers of libraries beyond 2 GiB.",
)
"""As docs/planning.md says it; a test compares the two."""


def report_of(found: Answer) -> PlanReport:
    """The page's value for a job by its sizes."""
    asked, search = found.asked, found.search
    best = search.best[0] if search.best else None
    return PlanReport(
        question(asked),
        nothing_fits(found) if best is None else sentence(found),
        search,
        asked.limit_bytes,
        _to_write(found),
        plans_table(asked, search.best),
        kinds_table(found),
        guide_table(found),
        _storage(found) if found.storage else None,
        others(found),
        terms(found) if best else (),
        pipeline(best, stage_costs(asked.job, asked.machines, best.division)) if best else None,
        _assumptions(asked),
        HOW_RIGHT,
        machine_table(asked.machines),
    )


def _storage(found: Answer) -> tuple[str, list[Table]]:
    """The lines printed about storage, as sentences."""
    lines, tables = storage(found)
    return lines.replace("\n", ". "), tables


def _to_write(found: Answer) -> ToWrite | None:
    plan = found.runs_today
    if plan is None:
        return None
    one, microbatches = plan.division, plan.step.microbatches
    who = "weft runs" if one.data == 1 else f"each of {one.data} replicas runs"
    return ToWrite(
        today(found),
        command(one, microbatches, found.asked.machines, found.asked.job),
        settings(one, microbatches, found.asked.job),
        f"In a step {who} {_many(microbatches, 'microbatch', 'es')} of {_many(one.microbatch, 'sequence')}.",
    )


def _many(count: int, what: str, more: str = "s") -> str:
    return f"{count} {what}{'' if count == 1 else more}"


def _adapters(job: Job) -> str:
    bits = job.quantized or 8 * job.parameter_bytes
    return f"The model is frozen, in {bits} bits; its linears have adapters of rank {job.lora} (LoRA)."


def _assumptions(asked: Asked) -> list[str]:
    job, device = asked.job, asked.machines.host.accelerator
    lines = [
        f"Products run in {job.precision}; gradients are summed in {8 * job.gradient_bytes} bits; {job.optimizer} "
        f"keeps {job.state_bytes} bytes for each parameter{', in host memory' if job.offload_optimizer else ''}.",
        *([_adapters(job)] if job.lora else []),
        *(["Weights wait in host memory, but for the layers that run."] if job.offload_weights else []),
        "Attention is fused: its scores stay out of memory (`--unfused-attention` says otherwise)."
        if job.fused_attention
        else "Attention writes its scores into memory.",
        "Operations between products are kernels of their own."
        if job.eager
        else "Operations between products are fused, as by `torch.compile` (`--eager` says otherwise).",
        "All ranks are alike, and data are there when they are needed.",
    ]
    if assumptions(asked):
        lines.append(f"Assumed, not fitted: {assumptions(asked)}.")
    if asked.memory_bytes is None:
        lines.append(
            f"{format_bytes(asked.limit_bytes)} of a device's {format_bytes(device.memory_bytes)} can be used: "
            f"{LOST:.0%} are lost between blocks of its allocator (`--memory` says otherwise)."
        )
    lines.append(f"{format_bytes(RESERVED)} of that count as taken by driver, libraries and collectives.")
    if asked.machines.host.price_per_hour is not None:
        lines.append(f"A host costs {asked.machines.host.price_per_hour:g} an hour.")
    return lines


def machine_table(machines: Machines) -> Table:
    """The figures of a machine that a plan stands on."""
    host, device = machines.host, machines.host.accelerator
    rows = [
        ("accelerators of a host", str(host.accelerators)),
        ("memory", f"{format_bytes(device.memory_bytes)}, {format_bytes(device.bytes_per_s)}/s"),
        *(
            (
                f"peak in {dtype}",
                f"{peak / 1e12:g} TFLOP/s, of which products reach {device.rate(dtype) / peak:.0%}",
            )
            for dtype, peak in device.peak.items()
        ),
        ("link inside", _link(host.inside)),
        ("network, for each accelerator", _link(host.network)),
    ]
    return Table("The machine", (host.name, ""), rows, "<<")


def _link(link: Link) -> str:
    return f"{format_bytes(link.bytes_per_s)}/s, {format_seconds(link.latency_s)}"
