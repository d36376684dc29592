"""Advice in the order to try it, with what it saves here: replicas first, then what saves memory, then model
parallelism.

The order is that of the guides of SageMaker's model parallelism: data parallelism if the model fits; else a smaller
batch, recomputation, mixed precision, gradients in fewer bits, smaller inputs; then model parallelism; then both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weft.machines.accelerator import BYTES_OF
from weft.machines.host import Machines
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.memory import copies, memory_of, usable_bytes
from weft.plan.parallelism.search import KINDS, Found, search
from weft.plan.parallelism.step import step_of

BUBBLE = 0.05


@dataclass(frozen=True)
class Advice:
    """One thing to try.

    Attributes:
        what: What it is.
        memory_bytes: What the fullest rank then needs.
        step_s: What a step then takes, for the same sequences.
        fits: Whether it fits the device.
    """

    what: str
    memory_bytes: float
    step_s: float
    fits: bool


def guide(
    job: Job, machines: Machines, found: Found | None = None, limit_bytes: float | None = None
) -> list[Advice]:
    """Advice in the guide's order; each line keeps what the lines before it changed, up to the first that fits.

    Args:
        job: What is trained.
        machines: Where.
        found: What `search` found; searched for if not given.
        limit_bytes: What of a device may be used; all but what allocators lose if not given.
    """
    if limit_bytes is None:
        limit_bytes = usable_bytes(machines.host.accelerator.memory_bytes)
    found = found or search(job, machines, memory_bytes=limit_bytes)
    lines = _with_replicas(job, machines, limit_bytes)
    names = {
        "sharded": "replicas share parameters or states",
        "pipeline": "a pipeline over all ranks",
        "tensor": "tensor parallelism over all ranks",
        "hybrid": "both: model parallelism and replicas",
    }
    for kind in KINDS[1:]:
        if kind in found.of_kind:
            plan = found.of_kind[kind]
            what = f"{names[kind]}: {plan.division}"
            lines.append(Advice(what, plan.memory.total, plan.seconds, True))
    return lines


def _with_replicas(job: Job, machines: Machines, limit_bytes: float) -> list[Advice]:
    """Replicas alone, and what saves memory beside them, until it fits."""
    replicas = math.gcd(machines.size, job.batch)
    own = job.batch // replicas
    division = Division(data=replicas, microbatch=own)
    steps: list[tuple[str, Job, Division]] = [
        (f"{_many(replicas, 'replica')}, {_many(own, 'sequence')} each at once", job, division)
    ]
    division = replace(division, microbatch=1)
    if own > 1:
        steps.append(("one sequence at a time", job, division))
    division = replace(division, recompute="full")
    steps.append(("recomputation of whole layers", job, division))
    if BYTES_OF[job.precision] == 4:
        mixed = "bf16" if "bf16" in machines.host.accelerator.peak else "fp16"
        if mixed in machines.host.accelerator.peak:
            job = replace(job, precision=mixed)
            steps.append((f"mixed precision in {mixed}", job, division))
    if job.gradient_bytes == 4:
        job = replace(job, gradient_bytes=2)
        steps.append(("gradients in 16 bits", job, division))
    shorter = replace(job.sizes, seq=max(1, job.sizes.seq // 2))
    steps.append((f"inputs of {shorter.seq} tokens", replace(job, sizes=shorter), division))
    lines: list[Advice] = []
    for what, one, how in steps:
        lines.append(_advice(what, one, how, machines, limit_bytes))
        if lines[-1].fits:
            break
    return lines


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _advice(what: str, job: Job, division: Division, machines: Machines, limit_bytes: float) -> Advice:
    memory = memory_of(job, division, copied=copies(machines)).total
    step_s = step_of(job, division, machines).seconds
    return Advice(what, memory, step_s, memory <= limit_bytes)


def learning_rate(base: float, base_batch: int, batch: int, optimizer: str = "sgd") -> float:
    """The rate for a larger batch; on ImageNet the linear rule holds up to about 8,192 images.

        SGD, momentum    base x batch / base_batch           Goyal et al., arXiv 1706.02677: the linear rule, with five
                                                             epochs that warm up from `base`
        Adam and others  base x sqrt(batch / base_batch)     You et al., arXiv 1904.00962, for LAMB

    >>> learning_rate(0.1, 256, 8192), learning_rate(1e-3, 256, 1024, "adam")
    (3.2, 0.002)
    """
    ratio = batch / base_batch
    return base * (ratio if optimizer in ("sgd", "momentum") else math.sqrt(ratio))


def fewest_microbatches(job: Job, division: Division, machines: Machines) -> int:
    """The number of microbatches from which the bubble is under `BUBBLE` of work and bubble together; 1 without one."""
    most = replace(division, microbatch=1)
    step = step_of(replace(job, batch=division.data * 10**6), most, machines)
    if not step.bubble:
        return 1
    return math.floor(step.bubble * (1 - BUBBLE) / BUBBLE / step.busiest.total) + 1
