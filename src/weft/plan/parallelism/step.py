"""The seconds of a step: work of the busiest rank, the bubble, crossings, what replicas exchange, the optimizer.

    step = (m busiest + bubble + crossings + exposed + optimizer) (1 + late)

Letters: p ranks in a row, v chunks, m microbatches. Every term is one that `--explain` shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from weft.machines.host import Machines
from weft.plan.parallelism.adapters import adapter_parameters
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.layer import (
    LayerTimes,
    Times,
    all_reduce_s,
    exchanged_by_tensor_s,
    gather_s,
    mean_layer_times,
    rank_tokens,
)
from weft.plan.parallelism.shares import Part, Shares, shares


@dataclass(frozen=True)
class Step:
    """The terms of a step, in seconds.

    Attributes:
        layer: One layer, one microbatch, one rank; the mean of all if they are not alike.
        busiest: What the busiest rank computes of one microbatch.
        microbatches: How many of them.
        bubble: In which ranks wait for the first and the last microbatches.
        crossings: What sending to the next stage and receiving costs.
        exposed: What replicas exchange while nothing is computed.
        beside: What they exchange beside computation.
        optimizer: Reading and writing parameters, gradients and states.
        late: The share by which the slowest rank is late.
        layers: How many layers the busiest rank has.
    """

    layer: LayerTimes
    busiest: Times
    microbatches: int
    bubble: float
    crossings: float
    exposed: float
    beside: float
    optimizer: float
    late: float
    layers: float = 0

    @property
    def work(self) -> float:
        return self.microbatches * self.busiest.total

    @property
    def seconds(self) -> float:
        parts = self.work + self.bubble + self.crossings + self.exposed + self.optimizer
        return parts * (1 + self.late)


class StepTimes:
    """Times of layers and heads of one job on some machines, each reckoned once: many divisions share them."""

    def __init__(self, job: Job, machines: Machines) -> None:
        self.job, self.machines = job, machines
        self._known: dict[tuple[object, ...], tuple[LayerTimes, Times]] = {}

    def of(self, division: Division) -> tuple[LayerTimes, Times]:
        """A layer's times and the head's, for one microbatch on one rank."""
        one = division
        several = one.microbatches(self.job) > 1
        key = (one.tensor, one.context, one.microbatch, one.recompute, one.along, several, one.experts)
        if key not in self._known:
            self._known[key] = (
                mean_layer_times(self.job, one, self.machines),
                head_times(self.job, one, self.machines),
            )
        return self._known[key]

    def shares(self, division: Division) -> Shares:
        """Layers of each stage, with a head that costs as much as it does here."""
        layer, head = self.of(division)
        sizes = self.job.sizes
        return shares(sizes.layers, division, head.total / layer.total.total, sizes.dense_layers)


def step_of(job: Job, division: Division, machines: Machines, times: StepTimes | None = None) -> Step:
    """The step of a job that is divided so; `times` are those that other divisions of the job have reckoned."""
    microbatches, times = division.microbatches(job), times or StepTimes(job, machines)
    layer, head = times.of(division)
    found = times.shares(division)
    busiest, mean, layers = _ranks(found, layer.total, head)
    numbers = max(rank_parameters(job, division, part) for part in found.parts)
    trained = max(trained_parameters(job, division, part) for part in found.parts)
    computed = microbatches * busiest.total
    whole = exchanged_s(job, division, machines, microbatches, numbers, trained)
    exposed = _exposed(whole, computed, division, machines)
    if job.offload_weights:  # a layer's come for each pass, while the layer before computes
        copied = 2 * microbatches * job.sizes.layer_parameters / division.tensor * job.linear_bytes * layers
        exposed += max(0.0, copied / HOST_LINK - computed)
    return Step(
        layer,
        busiest,
        microbatches,
        bubble_s(division, busiest, mean, microbatches),
        crossings_s(job, division, machines, microbatches),
        exposed,
        whole - exposed,
        optimizer_s(job, division, machines, trained),
        machines.host.conduct.late(division.ranks),
        layers,
    )


def head_times(job: Job, division: Division, machines: Machines) -> Times:
    """The head and the loss: 2 T h V FLOPs over t; logits of 32 bits are written, read and written by the loss in the
    forward pass, and once more in the backward pass: 12 T V bytes over t and 8 more.

    Tensor-parallel ranks add up T h numbers of the embedding in the forward pass, and as many before the head in the
    backward pass. That counts where it was measured what a sum takes: fitted shares have it in them."""
    device, tokens = machines.host.accelerator, rank_tokens(job, division)
    dtype = job.precision if job.precision != "fp8" else "bf16"
    ahead = device.product_s(job.sizes.head_flops(tokens) / division.tensor, dtype)
    moved = device.move_s(tokens * job.sizes.vocab / division.tensor)
    summed = 0.0
    if machines.host.sums is not None:
        summed = exchanged_by_tensor_s(division, machines, tokens * job.sizes.hidden * job.parameter_bytes)
    weights = 0.0 if job.lora else ahead
    return Times(ahead + 12 * moved + summed, ahead + 8 * moved + summed, weights)


def _ranks(found: Shares, layer: Times, head: Times) -> tuple[Times, Times, float]:
    """The times of the busiest rank and the mean of all for a microbatch, and the layers of the busiest one."""
    ranks = [
        (layer.times(part.layers).plus(head if part.head else Times()), part.layers) for part in found.parts
    ]
    busiest, layers = max(ranks, key=lambda rank: rank[0].total)
    whole = layer.times(sum(found.stages)).plus(head)
    return busiest, whole.times(1 / len(found.ranks)), layers


def bubble_s(division: Division, busiest: Times, mean: Times, microbatches: int) -> float:
    """The seconds that the busiest rank waits; F, I, W of a rank, all its chunks together.

        gpipe, 1f1b            (p - 1) (F + I + W)          Narayanan et al., arXiv 2104.04473, section 2.2
        interleaved_1f1b       (p - 1) (F + I + W) / v      the same
        zb_h1                  (p - 1) (F + I - W)          Qi et al., arXiv 2401.10241, section 2
        zbv                    (p - 1) (F + I - 2 W)        0 for F = I = W; else that of ZB-H2, section 2.2
        zb_2p                  0                            twice the memory of activations

    With few microbatches the W that fill the gaps run out: no less than (p - 1) (F + I) - (m - 1) W, so that a step of
    m <= p takes (m + p - 1) (F + I) + W. For `zbv` and `zb_2p` that is each rank's own time from its first action to
    its last one; ranks begin after each other. Of ranks that are not alike, the others' work counts: p mean - busiest
    in place of (p - 1) busiest.
    """
    ranks = division.pipeline
    if ranks == 1:
        return 0.0
    alone = max(0.0, ranks * mean.total - busiest.total)
    filled = {"zb_h1": 2.0, "zbv": 3.0, "zb_2p": math.inf}.get(division.schedule)
    if filled is not None:
        there = (ranks + microbatches - 2) * mean.weights
        return max(0.0, alone - min(filled * (ranks - 1) * mean.weights, there))
    return alone / (division.chunks if division.schedule == "interleaved_1f1b" else 1)


def crossings_s(job: Job, division: Division, machines: Machines, microbatches: int) -> float:
    """The seconds that sending and receiving cost the busiest rank, with T_c for a crossing.

        (2 (p - 1) + (m v - 1) 2 (p - 1) / p) T_c

    The first and last microbatch cross all ranks, and every round of 1F1B in between pays a round trip; for v = 1 that
    is what table 5 of arXiv 2401.10241 has. A crossing takes T h numbers, over t where ranks scatter and gather them
    (arXiv 2104.04473, section 4.1).
    """
    ranks = division.pipeline
    if ranks == 1:
        return 0.0
    stride = division.tensor * division.context * division.data
    size = float(rank_tokens(job, division) * job.sizes.hidden * job.parameter_bytes)
    size /= division.tensor if division.scattered else 1
    return crossing_rounds(division, microbatches) * (
        machines.hop_s(size, stride) + machines.host.conduct.crossing_s
    )


def crossing_rounds(division: Division, microbatches: int) -> float:
    """The number of crossings that the busiest rank pays for in a step: see `crossings_s`."""
    ranks = division.pipeline
    visits = microbatches * division.chunks
    return 2 * (ranks - 1) + (visits - 1) * 2 * (ranks - 1) / ranks


class Numbers(NamedTuple):
    """Parameters of one rank, before those that have the same share them.

    Attributes:
        all: How many.
        experts: How many of them are experts', which fewer ranks have.
    """

    all: float
    experts: float

    def each(self, ranks: int, experts: int) -> float:
        """The elements on one rank if so many share all but the experts, and so many those."""
        return (self.all - self.experts) / ranks + self.experts / experts


def rank_parameters(job: Job, division: Division, part: Part) -> Numbers:
    """Parameters of a rank: its layers with its experts, the embedding, the head, over t.

    A head that shares the embedding's matrix has a copy of it where they are on two ranks.
    """
    sizes = job.sizes
    ends = sizes.embedding_parameters if part.embedding else 0
    if part.head and not (sizes.tied and part.embedding):
        ends += sizes.table_parameters
    experts = (part.layers - part.dense) * sizes.expert_parameters
    rest = (part.layers - part.dense) * sizes.layer_parameters - experts + ends
    rest += part.dense * sizes.dense.layer_parameters
    own = experts / division.experts / division.tensor
    return Numbers(rest / division.tensor + own, own)


def trained_parameters(job: Job, division: Division, part: Part) -> Numbers:
    """Parameters of a rank that are trained: all, or those of its adapters; over t."""
    if not job.lora:
        return rank_parameters(job, division, part)
    every, experts = adapter_parameters(job.sizes, job.lora)
    dense = adapter_parameters(job.sizes.dense, job.lora)[0] if part.dense else 0
    layers = part.layers - part.dense
    own = layers * experts / division.experts / division.tensor
    return Numbers((layers * (every - experts) + part.dense * dense) / division.tensor + own, own)


def exchanged_s(
    job: Job, division: Division, machines: Machines, microbatches: int, numbers: Numbers, trained: Numbers
) -> float:
    """The seconds of the replicas' exchange in a step, for the N parameters (`numbers`) of the rank that has most. Of a
    frozen model gradients, and what an optimizer has changed, are those of its adapters (`trained`).

        none          an all-reduce of N gradients
        optimizer     an all-reduce of N gradients (where `scatters`, a reduce-scatter), and N
                      parameters, as products read them, gathered as parameters that ranks share
        parameters    for each microbatch, layer by layer, N parameters are gathered for the forward and again for the
                      backward pass, and a reduce-scatter of N gradients (Rajbhandari et al., arXiv 1910.02054, 7)

    Context-parallel ranks have the same parameters, so they add up with the replicas. Experts are exchanged by those
    that have the same ones.
    """

    def exchange(count: float, changed: float, ranks: int, stride: int) -> float:
        sharded = division.sharded == "parameters"
        ring = machines.sharing_ring(ranks, stride) if sharded else machines.ring(ranks, stride)
        gradients, parameters = changed * job.gradient_bytes, changed * job.parameter_bytes
        if sharded and job.lora:
            parameters += count * job.linear_bytes
        if division.sharded == "none":
            return all_reduce_s(gradients, ranks, ring)
        if division.sharded == "optimizer" and job.scatters:
            return gather_s(gradients, ranks, ring) + gather_s(parameters, ranks, ring)
        if division.sharded == "optimizer":
            gathered = gather_s(parameters, ranks, machines.sharing_ring(ranks, stride))
            return all_reduce_s(gradients, ranks, ring) + gathered
        layers = job.sizes.layers / division.pipeline
        one = 2 * gather_s(parameters / layers, ranks, ring) + gather_s(gradients / layers, ranks, ring)
        return microbatches * layers * one

    if division.experts == 1:
        return exchange(numbers.all, trained.all, division.alike, division.tensor)
    rest = numbers.all - numbers.experts, trained.all - trained.experts
    return exchange(*rest, division.alike, division.tensor) + exchange(
        numbers.experts, trained.experts, division.alike_experts, division.tensor * division.experts
    )


def _exposed(whole: float, computed: float, division: Division, machines: Machines) -> float:
    """The seconds of the exchange beside which nothing is computed: what the machine does not hide, or cannot at
    that length."""
    conduct = machines.host.conduct
    share = conduct.parameters if division.sharded == "parameters" else conduct.data
    return max(whole * (1 - share), whole - computed)


HOST_LINK = 25e9
"""Bytes a second between a device and host memory: 80 % of the 31.5 GB/s of PCIe 4.0 x16."""


def optimizer_s(job: Job, division: Division, machines: Machines, numbers: Numbers) -> float:
    """Reading gradients, reading and writing states and the parameters of 32 and 16 bits, in seconds.

    States in host memory come to the device and go back, by buckets; both directions, and the update of another bucket,
    at once.
    """
    shared = (division.alike, division.alike_experts) if division.sharded != "none" else (1, 1)
    moved = job.gradient_bytes + 2 * job.state_bytes + 2 * job.parameter_bytes
    count = numbers.each(*shared)
    update_s = machines.host.accelerator.move_s(count * moved)
    return max(update_s, count * job.state_bytes / HOST_LINK) if job.offload_optimizer else update_s
