"""All ways to divide a job over machines, the fastest first: exact enumeration.

    ranks = tensor x context x data x pipeline        tensor x context within a host
    batch = data x microbatch x microbatches          all whole numbers
    experts                                           shared by a number of replicas that divides both

What is left out is never better: schedules with one microbatch a rank at most, chunks that layers do not fill,
context parallelism of short sequences, sharded parameters in a pipeline (they would be gathered for every microbatch
of every stage), tensor parallelism without sequence parallelism, unless it was measured that gathers and scatters take
longer than sums (`Host.tokens`). A division whose parameters, gradients and states
alone do not fit is not looked at further: that is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from weft.machines.host import Machines
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.memory import Memory, copies, memory_of, usable_bytes
from weft.plan.parallelism.step import Step, StepTimes, step_of
from weft.plan.parallelism.supported_layouts import cannot

KEPT = 10
"""How many of the fastest divisions are kept."""
CHUNKS = (2, 3, 4, 6, 8, 12)
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHORTEST = 8192
"""Tokens that a context-parallel rank should have at least."""
KINDS = ("data", "sharded", "pipeline", "tensor", "hybrid")


@dataclass(frozen=True)
class Plan:
    """A division with what it takes.

    Attributes:
        division: How the job is divided.
        step: The terms of its step.
        memory: What the fullest rank needs.
    """

    division: Division
    step: Step
    memory: Memory

    @property
    def seconds(self) -> float:
        """The step."""
        return self.step.seconds

    @property
    def kind(self) -> str:
        """The kind of the plan, one of `KINDS`.

        data: replicas only; sharded: replicas that share states or parameters; pipeline, tensor: one of these on all
        ranks; hybrid: anything else.
        """
        one = self.division
        if one.ranks == one.data and one.experts == 1:
            return "data" if one.sharded == "none" else "sharded"
        if one.ranks in (one.pipeline, one.tensor):
            return "pipeline" if one.ranks == one.pipeline else "tensor"
        return "hybrid"


@dataclass
class Found:
    """The result of a search.

    Attributes:
        best: The fastest divisions that fit, at most `KEPT`.
        of_kind: The fastest one of each kind that fits.
        runs_today: The fastest one that weft itself can run.
        fits: How many fit.
        tried: How many there are.
        too_large: How many do not fit, with the one that lacks least.
        nearest: The one that lacks least, if some do not fit.
        refused: Why others cannot be at all, with how many of them.
    """

    best: list[Plan] = field(default_factory=list)
    of_kind: dict[str, Plan] = field(default_factory=dict)
    runs_today: Plan | None = None
    fits: int = 0
    tried: int = 0
    too_large: int = 0
    nearest: tuple[Division, Memory] | None = None
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, why: str) -> None:
        """Count a division that cannot be."""
        self.refused[why] = self.refused.get(why, 0) + 1

    def lack(self, division: Division, memory: Memory) -> None:
        """Count a division that does not fit."""
        self.tried += 1
        self.too_large += 1
        if self.nearest is None or memory.total < self.nearest[1].total:
            self.nearest = division, memory


def search(job: Job, machines: Machines, *, memory_bytes: float | None = None) -> Found:
    """The fastest ways to divide a job over all ranks of some machines.

    Args:
        job: What is trained.
        machines: Where.
        memory_bytes: What of a device's memory may be used; all but what allocators lose if not given.

    >>> from weft.graph.sizes import Sizes
    >>> from weft.machines.cluster import parse_cluster
    >>> small = Sizes(layers=4, hidden=256, heads=4, ffn=1024, vocab=1000, seq=128)
    >>> search(Job(small, batch=64), parse_cluster("8xA100-80")).best[0].division.data
    8
    """
    limit = usable_bytes(machines.host.accelerator.memory_bytes) if memory_bytes is None else memory_bytes
    found = Found()
    times, copied = StepTimes(job, machines), copies(machines)
    for division in divisions(job, machines, found):
        memory = memory_of(job, division, times.shares(division), copied)
        if memory.total > limit:
            found.lack(division, memory)
        else:
            keep(found, Plan(division, step_of(job, division, machines, times), memory), limit, job)
    return found


def keep(found: Found, plan: Plan, limit_bytes: float, job: Job | None) -> None:
    """Count a plan; among the best, and the best of its kind, if it fits and is one of them."""
    if plan.memory.total > limit_bytes:
        found.lack(plan.division, plan.memory)
        return
    found.tried += 1
    found.fits += 1
    same = found.of_kind.get(plan.kind)
    if same is None or _merit(plan) < _merit(same):
        found.of_kind[plan.kind] = plan
    if len(found.best) < KEPT or _merit(plan) < _merit(found.best[-1]):
        found.best = sorted([*found.best, plan], key=_merit)[:KEPT]
    today = found.runs_today
    if (today is None or _merit(plan) < _merit(today)) and not cannot(job, plan.division):
        found.runs_today = plan


def _merit(plan: Plan) -> tuple[float, float]:
    """The smaller the better: the step, and of equal steps the memory."""
    return float(f"{plan.seconds:.6g}"), plan.memory.total


def divisions(job: Job, machines: Machines, found: Found) -> Iterator[Division]:
    """Every division that can be; `found.refused` counts why others cannot."""
    sizes, host = job.sizes, machines.host
    for tensor in divisors(host.accelerators):
        if sizes.heads % tensor or (sizes.key_heads % tensor and tensor % sizes.key_heads):
            found.refuse(f"{sizes.heads} heads ({sizes.key_heads} of keys) do not divide by {tensor}")
            continue
        for context in divisors(host.accelerators // tensor):
            if context > 1 and (sizes.seq % context or sizes.seq // context < SHORTEST):
                continue
            for pipeline in divisors(machines.size // (tensor * context)):
                if pipeline > sizes.layers:
                    found.refuse(f"more pipeline ranks than the {sizes.layers} layers")
                    continue
                data = machines.size // (tensor * context * pipeline)
                if job.batch % data:
                    found.refuse(f"{data} replicas do not divide the batch of {job.batch}")
                    continue
                for experts in _expert_ranks(job, data):
                    base = Division(data, tensor, pipeline, context=context, experts=experts)
                    for along in _along(job, tensor, machines):
                        yield from _variants(job, replace(base, along=along))


def _expert_ranks(job: Job, data: int) -> list[int]:
    """The numbers of replicas that may share the experts."""
    experts = job.sizes.experts
    return [1] if experts is None else divisors(math.gcd(experts.count, data))


def _along(job: Job, tensor: int, machines: Machines) -> tuple[bool, ...]:
    """True, False or both: may tensor-parallel ranks split the sequence, too; both ways where either may be faster."""
    if tensor == 1 or machines.host.tokens is None:
        return (True,)
    return (True, False) if job.sizes.seq % tensor == 0 else (False,)


def _variants(job: Job, base: Division) -> Iterator[Division]:
    """The schedules, microbatches, and ways to save memory of a division."""
    own = job.batch // base.data
    replicas = base.data * base.context
    sharded = ["none"] if replicas == 1 else ["none", "optimizer"]
    if replicas > 1 and base.pipeline == 1:
        sharded.append("parameters")
    recompute = ("none", "full") if job.fused_attention else ("none", "selective", "full")
    for microbatch in MICROBATCHES:
        if own % microbatch:
            continue
        for schedule, chunks in _schedules(job, base.pipeline, own // microbatch):
            for shared in sharded:
                for again in recompute:
                    yield replace(
                        base,
                        schedule=schedule,
                        chunks=chunks,
                        microbatch=microbatch,
                        sharded=shared,
                        recompute=again,
                    )


def _schedules(job: Job, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """(schedule, chunks) that may be the best for so many ranks in a row."""
    yield "1f1b", 1
    if ranks == 1:
        return
    yield "zb_h1", 1
    if 2 * ranks <= job.sizes.layers:
        yield "zbv", 2
    for chunks in CHUNKS:
        if job.sizes.layers % (ranks * chunks) == 0 and microbatches % ranks == 0:
            yield "interleaved_1f1b", chunks


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return low + [number // one for one in reversed(low) if one * one != number]
