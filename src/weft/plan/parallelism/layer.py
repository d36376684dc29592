"""What one layer takes on one rank, for one microbatch: products, attention, what lies between, what is exchanged.

Letters as in `weft.graph.sizes`; T = b s / c tokens of this rank's microbatch, t tensor-parallel and c context-parallel
ranks. All is in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.machines.host import Host, Machines
from weft.plan.parallelism.job import Division, Job
from weft.topology.cluster import Link

UNALIGNED = 6.0
"""How many times as long products of attention take whose heads are no multiples of 8 wide: 16-bit tensor cores want
that (NVIDIA, "Matrix Multiplication Background User's Guide"). Of BigScience's runs with heads of 108 and 225."""


@dataclass(frozen=True)
class Times:
    """What a stage or a layer takes of a microbatch, in seconds.

    Attributes:
        forward: Its forward pass.
        inputs: The part of its backward pass that the stage before waits for, with what is computed again.
        weights: The part that nobody waits for.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    @property
    def backward(self) -> float:
        return self.inputs + self.weights

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights

    def times(self, factor: float) -> Times:
        return Times(self.forward * factor, self.inputs * factor, self.weights * factor)

    def plus(self, other: Times) -> Times:
        return Times(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)


@dataclass(frozen=True)
class LayerTimes:
    """A layer's parts; `again` is of the backward pass and has all parts of what is computed again."""

    products: Times
    attention: Times
    between: Times
    exchange: Times
    again: float

    @property
    def total(self) -> Times:
        parts = self.products.plus(self.attention).plus(self.between).plus(self.exchange)
        return parts.plus(Times(inputs=self.again))


def all_reduce_s(size: float, ranks: int, link: Link) -> float:
    """How long a ring takes to add up `size` bytes of each rank and give all the sum, in seconds.

        2 (n - 1) / n size / bandwidth + 2 (n - 1) latency

    Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    >>> all_reduce_s(4e9, 2, Link(0.0, 1e9))
    4.0
    """
    return 2 * gather_s(size, ranks, link)


def gather_s(size: float, ranks: int, link: Link) -> float:
    """How long a ring takes to gather `size` bytes on each rank, or to add up and scatter them: half an all-reduce."""
    return (ranks - 1) / ranks * size / link.bytes_per_s + (ranks - 1) * link.latency_s if ranks > 1 else 0.0


def layer_times(job: Job, division: Division, machines: Machines) -> LayerTimes:
    """One layer's times on one rank.

    Products: of T tokens with the layer's matrices over t, 2 FLOPs a number and token; the backward pass computes two
    products for each one, and with several microbatches reads and writes the gradients to add to them. Attention: see
    `attention_times`. Between: see `between_bytes`. Exchange: two sums of T h numbers in each pass (Shoeybi et al.,
    Megatron-LM, arXiv 1909.08053); along the sequence each is a gather and a scatter of the same bytes
    (arXiv 2205.05198).
    """
    host, device = machines.host, machines.host.accelerator
    tokens = rank_tokens(job, division)
    ahead = sum(device.product_s(flops, job.precision) for flops in _products(job, division, tokens))
    summed = device.move_s(2 * job.gradient_bytes * job.sizes.layer_matrices / division.tensor)
    products = Times(ahead, ahead, ahead + (summed if division.microbatches(job) > 1 else 0.0))
    attention = attention_times(job, division, host, tokens)
    moved = device.move_s(between_bytes(job, division, tokens))
    scores = device.move_s(score_bytes(job, division, tokens))
    between = Times(moved + scores, 2 * moved + 2 * scores)
    ring = machines.ring(division.tensor, 1)
    wide = tokens * job.sizes.hidden * job.parameter_bytes
    sums = 2 * all_reduce_s(wide, division.tensor, ring) * (1 - host.conduct.tensor)
    exchange = Times(sums, sums)
    again = {
        "none": 0.0,
        "selective": 0.0 if job.fused_attention else attention.forward + scores,
        "full": products.forward + attention.forward + between.forward + exchange.forward,
    }[division.recompute]
    return LayerTimes(products, attention, between, exchange, again)


def rank_tokens(job: Job, division: Division) -> int:
    """T: tokens that a rank has of a microbatch."""
    return division.microbatch * job.sizes.seq // division.context


def _products(job: Job, division: Division, tokens: int) -> list[float]:
    """FLOPs of a layer's products on one rank: queries with keys and values, their result, up (and gate), down."""
    sizes = job.sizes
    numbers = [
        sizes.hidden * (sizes.query_width + 2 * sizes.key_width),
        sizes.hidden * sizes.query_width,
        sizes.hidden * sizes.ffn * (2 if sizes.gated else 1),
        sizes.hidden * sizes.ffn,
    ]
    return [2 * tokens * one / division.tensor for one in numbers]


def attention_times(job: Job, division: Division, host: Host, tokens: int) -> Times:
    """4 T s a d FLOPs over t.

    Fused: half of them, since masked tiles are skipped, and 2.5 times as many in the backward pass, which computes
    the scores again (Dao, FlashAttention-2, arXiv 2307.08691, section 4). Written out: four products in the backward
    pass for two in the forward pass, masked or not.
    """
    device, flops = host.accelerator, job.sizes.score_flops(tokens) / division.tensor
    if job.fused_attention:
        ahead = device.attention_s(flops / 2, job.precision)
        return Times(ahead, 2.5 * ahead)
    aligned = job.sizes.query_width // job.sizes.heads % 8 == 0
    dtype = "fp16" if job.precision == "fp8" and "fp16" in device.peak else job.precision
    ahead = 2 * device.product_s(flops / 2, dtype) * (1 if aligned else UNALIGNED)
    return Times(ahead, 2 * ahead)


def between_bytes(job: Job, division: Division, tokens: int) -> float:
    """What operations between products read and write in a forward pass, in bytes, at 16 bits.

    Two norms read and write h numbers each (8 h). Two residual sums with dropout read two, write one and a mask of a
    byte (14 h), or without dropout 12 h. The activation reads and writes f numbers (4 f), with a gate reads two (6 f).
    What is h wide is split over tensor-parallel ranks only along the sequence. The backward pass moves twice as much.

    Eager: queries, keys and values are copied apart and rotated besides (8 h and 8 h), and the activation and its gate
    are two operations (4 f and 6 f).
    """
    sizes = job.sizes
    outside = (20 if sizes.gated else 22) * sizes.hidden / (division.tensor if division.along else 1)
    inside = (6 if sizes.gated else 4) * sizes.ffn / division.tensor
    if job.eager:
        inside += (16 * sizes.hidden + (4 if sizes.gated else 0) * sizes.ffn) / division.tensor
    return tokens * (outside + inside) * job.parameter_bytes / 2


def score_bytes(job: Job, division: Division, tokens: int) -> float:
    """What attention reads and writes of its scores, in bytes; none if it is fused.

    Softmax reads and writes 2 bytes a score, dropout the same and a mask, the products write and read 2: 13 a s T / t.
    """
    if job.fused_attention:
        return 0.0
    return 13 * job.sizes.heads * job.sizes.seq * tokens / division.tensor * job.parameter_bytes / 2
