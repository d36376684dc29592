"""The seconds of one layer on one rank, for one microbatch: products, attention, what lies between, what is exchanged.

Letters as in `weft.graph.sizes`; T = b s / c tokens of this rank's microbatch, t tensor-parallel and c context-parallel
ranks. All is in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from weft.machines.host import Host, Machines
from weft.plan.parallelism.adapters import adapter_parameters
from weft.plan.parallelism.job import Division, Job
from weft.topology.cluster import Link

UNALIGNED = 6.0
"""How many times as long products of attention take whose heads are no multiples of 8 wide: 16-bit tensor cores want
that (NVIDIA, "Matrix Multiplication Background User's Guide"). Of BigScience's runs with heads of 108 and 225."""


@dataclass(frozen=True)
class Times:
    """The seconds of a stage or a layer for a microbatch.

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
    dispatch: Times = field(default_factory=Times)

    @property
    def total(self) -> Times:
        parts = self.products.plus(self.attention).plus(self.between).plus(self.exchange).plus(self.dispatch)
        return parts.plus(Times(inputs=self.again))

    def times(self, factor: float) -> LayerTimes:
        return LayerTimes(
            self.products.times(factor),
            self.attention.times(factor),
            self.between.times(factor),
            self.exchange.times(factor),
            self.again * factor,
            self.dispatch.times(factor),
        )

    def plus(self, other: LayerTimes) -> LayerTimes:
        return LayerTimes(
            self.products.plus(other.products),
            self.attention.plus(other.attention),
            self.between.plus(other.between),
            self.exchange.plus(other.exchange),
            self.again + other.again,
            self.dispatch.plus(other.dispatch),
        )


def all_reduce_s(size: float, ranks: int, link: Link) -> float:
    """The seconds of a ring's all-reduce of `size` bytes of each rank.

        2 (n - 1) / n size / bandwidth + 2 (n - 1) latency

    Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    >>> all_reduce_s(4e9, 2, Link(0.0, 1e9))
    4.0
    """
    return 2 * gather_s(size, ranks, link)


def gather_s(size: float, ranks: int, link: Link) -> float:
    """The seconds of a ring's all-gather of `size` bytes on each rank, or of a reduce-scatter: half an all-reduce."""
    return (ranks - 1) / ranks * size / link.bytes_per_s + (ranks - 1) * link.latency_s if ranks > 1 else 0.0


def exchanged_by_tensor_s(division: Division, machines: Machines, size: float) -> float:
    """The seconds of an all-reduce of `size` bytes over tensor-parallel ranks, less what is hidden; along the
    sequence of an all-gather and a reduce-scatter."""
    ring = machines.tensor_ring(division.tensor, division.along)
    return all_reduce_s(size, division.tensor, ring) * (1 - machines.host.conduct.tensor)


def mean_layer_times(job: Job, division: Division, machines: Machines) -> LayerTimes:
    """The mean of all layers' times on one rank: where the first ones have no experts, they count as what they are."""
    sizes = job.sizes
    found = layer_times(job, division, machines)
    if not sizes.dense_layers:
        return found
    dense = layer_times(replace(job, sizes=sizes.dense), division, machines)
    share = sizes.dense_layers / sizes.layers
    return found.times(1 - share).plus(dense.times(share))


def layer_times(job: Job, division: Division, machines: Machines) -> LayerTimes:
    """One layer's times on one rank.

    Products: of T tokens with the layer's matrices over t, 2 FLOPs a number and token; the backward pass computes two
    products for each one, and with several microbatches reads and writes the gradients to add to them. Attention: see
    `attention_times`. Between: see `between_bytes`. Exchange: two sums of T h numbers in each pass (Shoeybi et al.,
    Megatron-LM, arXiv 1909.08053); along the sequence each is a gather and a scatter of the same bytes
    (arXiv 2205.05198). Experts: see `experts_s` and `dispatch_s`.
    """
    host, device = machines.host, machines.host.accelerator
    tokens = rank_tokens(job, division)
    ahead = sum(device.product_s(flops, job.precision) for flops in _products(job, division, tokens))
    ahead += experts_s(job, division, machines, tokens)
    kept = job.sizes.layer_matrices + job.sizes.missed_parameters / division.experts
    summed = device.move_s(2 * job.gradient_bytes * kept / division.tensor)
    products = Times(ahead, ahead, ahead + (summed if division.microbatches(job) > 1 else 0.0))
    if job.lora:
        products = _with_adapters(job, division, machines, tokens, ahead)
    attention = attention_times(job, division, host, tokens)
    moved = device.move_s(between_bytes(job, division, tokens))
    scores = device.move_s(score_bytes(job, division, tokens))
    between = Times(moved + scores, 2 * moved + 2 * scores)
    wide = tokens * job.sizes.hidden * job.parameter_bytes
    networks = job.sizes.experts.per_token if job.sizes.experts else 1
    sums = (1 + networks) * exchanged_by_tensor_s(division, machines, wide)
    exchange, dispatch = Times(sums, sums), dispatch_s(job, division, machines, tokens)
    again = {
        "none": 0.0,
        "selective": 0.0 if job.fused_attention else attention.forward + scores,
        "full": products.forward + attention.forward + between.forward + exchange.forward + dispatch.forward,
    }[division.recompute]
    return LayerTimes(products, attention, between, exchange, again, dispatch)


def _with_adapters(job: Job, division: Division, machines: Machines, tokens: int, ahead: float) -> Times:
    """Products of a frozen layer and its adapters: gradients of weights are those of the adapters only.

    Frozen weights of fewer bits are read and written once more in each pass, as 16 bits for a product.
    """
    device = machines.host.accelerator
    every, experts = adapter_parameters(job.sizes, job.lora)
    met = every - experts
    if job.sizes.experts is not None:
        met += experts * job.sizes.experts.per_token // job.sizes.experts.count
    own = device.product_s(2 * tokens * met / division.tensor, job.precision)
    read = 0.0
    if job.quantized:
        kept = job.sizes.layer_matrices + job.sizes.missed_parameters / division.experts
        read = device.move_s((job.linear_bytes + job.parameter_bytes) * kept / division.tensor)
    return Times(ahead + own + read, ahead + own + read, own)


def rank_tokens(job: Job, division: Division) -> int:
    """T: tokens that a rank has of a microbatch."""
    return division.microbatch * job.sizes.seq // division.context


def _products(job: Job, division: Division, tokens: int) -> list[float]:
    """FLOPs of a layer's products on one rank: queries with keys and values, their result, up (and gate), down.

    Of a layer with experts up and down are those of the shared ones, if there are any, and the router's is added.
    """
    sizes = job.sizes
    width = sizes.experts.shared if sizes.experts else sizes.ffn
    up = sizes.hidden * width * (2 if sizes.gated else 1)
    numbers = [*sizes.attention_products, *((up, sizes.hidden * width) if width else ())]
    if sizes.experts:
        numbers.append(sizes.hidden * sizes.experts.count)
    return [2 * tokens * one / division.tensor for one in numbers]


def experts_s(job: Job, division: Division, machines: Machines, tokens: int) -> float:
    """Products of the experts of one rank in a forward pass, in seconds; j of e experts for each token.

    Up (and gate) and down, of T j tokens: so many come to a rank in the mean, and the router is taken to spread them
    evenly. Experts of a rank run as one grouped product (Gale et al., MegaBlocks, arXiv 2211.15841), or eager one after
    the other. With few tokens for each, reading their numbers takes longer, and counts instead (Williams et al.,
    "Roofline", 2009).
    """
    sizes, device = job.sizes, machines.host.accelerator
    if sizes.experts is None:
        return 0.0
    own = sizes.experts.count / division.experts
    starts = own if job.eager else 1.0
    seconds = 0.0
    for matrices in (2 if sizes.gated else 1, 1):
        numbers = matrices * sizes.hidden * sizes.experts.width / division.tensor
        flops = 2 * tokens * sizes.experts.per_token * numbers
        read = device.move_s(own * numbers * job.parameter_bytes)
        seconds += max(starts * device.product_s(flops / starts, job.precision), read)
    return seconds


def dispatch_s(job: Job, division: Division, machines: Machines, tokens: int) -> Times:
    """The seconds of sending tokens to their experts and back: two all-to-alls in each pass (GShard, arXiv
    2006.16668, section 3.2) of T j h numbers, over t where tensor-parallel ranks split the sequence."""
    sizes = job.sizes
    if sizes.experts is None or division.experts == 1:
        return Times()
    size = float(tokens * sizes.experts.per_token * sizes.hidden * job.parameter_bytes)
    size /= division.tensor if division.along else 1
    both = 2 * machines.all_to_all_s(size, division.experts, division.tensor * division.context)
    return Times(both, both)


def attention_times(job: Job, division: Division, host: Host, tokens: int) -> Times:
    """4 T s a d FLOPs over t.

    Fused: half of them, since masked tiles are skipped, and 2.5 times as many in the backward pass, which computes
    the scores again (Dao, FlashAttention-2, arXiv 2307.08691, section 4). Written out: four products in the backward
    pass for two in the forward pass, masked or not, and whatever windows leave out.
    """
    device, flops = host.accelerator, job.sizes.score_flops(tokens) / division.tensor
    if job.fused_attention:
        ahead = device.attention_s(flops / 2, job.precision)
        return Times(ahead, 2.5 * ahead)
    aligned = job.sizes.query_width // job.sizes.heads % 8 == 0
    dtype = "fp16" if job.precision == "fp8" and "fp16" in device.peak else job.precision
    ahead = 2 * device.product_s(flops / 2 / job.sizes.seen_share, dtype) * (1 if aligned else UNALIGNED)
    return Times(ahead, 2 * ahead)


def between_bytes(job: Job, division: Division, tokens: int) -> float:
    """The bytes that operations between products read and write in a forward pass, at 16 bits.

    Two norms read and write h numbers each (8 h). Two residual sums with dropout read two, write one and a mask of a
    byte (14 h), or without dropout 12 h. The activation reads and writes f numbers (4 f), with a gate reads two (6 f).
    What is h wide is split over tensor-parallel ranks only along the sequence. The backward pass moves twice as much.
    With experts tokens are put in order for them (read and written j times: 4 j h), and what they give is summed
    (2 j h + 2 h); f is j g + u.

    Eager: queries, keys and values are copied apart and rotated besides (8 h and 8 h), and the activation and its gate
    are two operations (4 f and 6 f).
    """
    sizes = job.sizes
    outside = (20 if sizes.gated else 22) * sizes.hidden / (division.tensor if division.along else 1)
    if sizes.experts:
        outside += (
            (6 * sizes.experts.per_token + 2) * sizes.hidden / (division.tensor if division.along else 1)
        )
    inside = (6 if sizes.gated else 4) * sizes.ffn_width / division.tensor
    if job.eager:
        inside += (16 * sizes.hidden + (4 if sizes.gated else 0) * sizes.ffn_width) / division.tensor
    return tokens * (outside + inside) * job.parameter_bytes / 2


def score_bytes(job: Job, division: Division, tokens: int) -> float:
    """The bytes of its scores that attention reads and writes; none if it is fused.

    Softmax reads and writes 2 bytes a score, dropout the same and a mask, the products write and read 2: 13 a s T / t.
    """
    if job.fused_attention:
        return 0.0
    return 13 * job.sizes.heads * job.sizes.seq * tokens / division.tensor * job.parameter_bytes / 2
