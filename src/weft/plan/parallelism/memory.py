"""The memory of the fullest rank: parameters, gradients, optimizer states, activations, and what is in use for a
moment.

N are the parameters of the rank (its layers and ends, over t), d the replicas that share them. Experts that are shared
out count as what a rank has of them, and for d only the replicas that have the same ones.

    parameters     N x 2 bytes (4 in 32 bits)           over d if parameters are sharded, with two layers gathered
    gradients      N x 4 bytes (or 2)                   over d if parameters are sharded
    states         N x 12 bytes for Adam with a copy    over d if states or parameters are sharded
                   of 32 bits
    activations    see `activation_bytes`
    copies         gradients once more                  at the end of the backward pass, when replicas add them up

With `Job.offload_weights` the parameters of all but `LAYERS_HERE` layers are in host memory; the ends stay.
With `Job.lora` gradients and states are those of the adapters, whose parameters come in addition; frozen linears have
`Job.linear_bytes` each. States in host memory count nothing here.

The 18 bytes without sharding are those of mixed precision with Adam (Rajbhandari et al., arXiv 1910.02054, section 3.1,
has 16: gradients in 16 bits).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.graph.sizes import Sizes
from weft.machines.host import Machines
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.layer import rank_tokens
from weft.plan.parallelism.shares import Part, Shares, shares
from weft.plan.parallelism.step import Numbers, rank_parameters, trained_parameters

RESERVED = 2 * 2**30
"""Bytes of a device that its driver, its libraries and the buffers of collectives take before training begins."""
LAYERS_HERE = 4
"""Layers that are on the device where weights are offloaded: one runs, one comes, and two are being let go."""
LOST = 0.04
"""Share of a device's memory that an allocator loses between blocks."""


@dataclass(frozen=True)
class Memory:
    """The bytes of the fullest rank, by what they are for."""

    parameters: float
    gradients: float
    states: float
    activations: float
    moment: float
    reserved: float = RESERVED

    @property
    def lasting(self) -> float:
        """Parameters, gradients and states: what no smaller batch and no recomputation saves."""
        return self.parameters + self.gradients + self.states

    @property
    def total(self) -> float:
        return self.lasting + self.activations + self.moment + self.reserved


def usable_bytes(memory_bytes: int) -> float:
    """The bytes of a device's memory that training can use."""
    return memory_bytes * (1 - LOST)


def memory_of(job: Job, division: Division, shared: Shares | None = None, copied: bool = False) -> Memory:
    """The memory of a pipeline's fullest rank: mostly the first one, which holds most microbatches.

    `shared`: layers of each rank (`StepTimes.shares`), cut inside as weft cuts them (`Shares.opened`); whole ones as
    even as can be, with a head that costs nothing, if not given. `copied`: see `with_copies`.
    """
    row = shared or shares(job.sizes.layers, division, 0.0, job.sizes.dense_layers)
    parts = row.parts
    if shared is not None:
        parts = tuple(replace(part, layers=max(part.dense, row.opened(part.place))) for part in parts)
    found = (_rank_memory(job, division, part) for part in parts)
    return max((with_copies(one, division, copied) for one in found), key=lambda one: one.total)


def _rank_memory(job: Job, division: Division, part: Part) -> Memory:
    """The memory of one rank."""
    sharing = (division.alike, division.alike_experts)
    trained = trained_parameters(job, division, part)
    whole = trained.each(*sharing) if division.sharded == "parameters" else trained.all
    stays = min(1.0, LAYERS_HERE / part.layers) if job.offload_weights and part.layers else 1.0
    away = 0.0 if job.lora else (1 - stays) * _layers(job, division, part).all
    states = trained.each(*sharing) if division.sharded != "none" else trained.all
    gathered = 0.0
    if division.sharded == "parameters" and division.alike > 1:
        sizes = job.sizes
        layer = sizes.layer_parameters - sizes.expert_parameters * (1 - 1 / division.experts)
        gathered = 2 * layer / division.tensor * job.linear_bytes
    return Memory(
        (whole - away) * job.parameter_bytes + gathered + _frozen(job, division, part, sharing, stays),
        whole * job.gradient_bytes,
        0.0 if job.offload_optimizer else states * job.state_bytes,
        activation_bytes(job, division, part),
        moment_bytes(job, division),
    )


def _layers(job: Job, division: Division, part: Part) -> Numbers:
    """The parameters of a rank's layers, without its ends."""
    return rank_parameters(job, division, replace(part, embedding=False, head=False))


def _frozen(job: Job, division: Division, part: Part, sharing: tuple[int, int], stays: float) -> float:
    """Bytes of a rank's frozen parameters: its layers' linears, of which a share `stays` on the device, and its ends,
    which are never of fewer bits."""
    if not job.lora:
        return 0.0
    every = rank_parameters(job, division, part)
    layers = _layers(job, division, part)
    shared = sharing if division.sharded == "parameters" else (1, 1)
    ends = every.each(*shared) - layers.each(*shared)
    return layers.each(*shared) * job.linear_bytes * stays + ends * job.parameter_bytes


def copies(machines: Machines) -> bool:
    """True if replicas copy their gradients into flat tensors to add them up; processors of one host do not."""
    return not (machines.hosts == 1 and machines.host.accelerator.is_cpu)


def with_copies(memory: Memory, division: Division, copied: bool) -> Memory:
    """The same with what replicas copy of their gradients, if they do: all are there twice during the all-reduce.

    The backward pass has come to its end then, so it is these copies or activations, whichever is more.
    """
    if not copied or division.alike == 1 or division.sharded == "parameters":
        return memory
    return replace(memory, moment=max(memory.moment, memory.gradients - memory.activations))


def held(division: Division, microbatches: int, place: int = 0) -> float:
    """The microbatches whose activations a rank holds at once, in units of all its layers; r is its place in the row.

        gpipe               m
        1f1b                min(m, p - r)                       Narayanan et al., arXiv 2104.04473, section 2.2
        interleaved_1f1b    p (1 + (p - 1 - 2 r) / (p v))       Korthikanti et al., arXiv 2205.05198, 4.2.3, for r = 0
        zb_h1, zbv          p                                   Qi et al., arXiv 2401.10241; sail-sg
        zb_2p          2 p - 1                             the same

    >>> held(Division(pipeline=8, chunks=3, schedule="interleaved_1f1b"), 64)
    10.333333333333334
    """
    ranks, chunks = division.pipeline, division.chunks
    if ranks == 1:
        return 1.0
    most = {
        "gpipe": float(microbatches),
        "1f1b": float(ranks - place),
        "interleaved_1f1b": ranks + (ranks - 1 - 2 * place) / chunks,
        "zb_2p": 2.0 * ranks - 1,
    }.get(division.schedule, float(ranks))
    return min(float(microbatches), most)


def activation_bytes(job: Job, division: Division, part: Part) -> float:
    """The bytes that wait for their backward pass on a rank (arXiv 2205.05198, section 4).

    its layers x microbatches held x bytes of a layer, + as many embeddings' masks on the first rank, + the head's, of
    one microbatch, on the last
    """
    sizes, tokens = job.sizes, rank_tokens(job, division)
    width = job.parameter_bytes / 2
    layers = (part.layers - part.dense) * _kept(job, division, sizes, division.recompute)
    if part.dense:
        layers += part.dense * _kept(job, division, sizes.dense, division.recompute)
    many = held(division, division.microbatches(job), part.place)
    ends = many * sizes.embedding_bytes(tokens, division.tensor) if part.embedding else 0.0
    ends += sizes.head_bytes(tokens, division.tensor) if part.head else 0.0
    return (many * layers + ends) * width


def _kept(job: Job, division: Division, sizes: Sizes, recompute: str) -> float:
    """The bytes that one layer keeps of a microbatch on a rank, at 16 bits."""
    tokens, scores = rank_tokens(job, division), not job.fused_attention
    return sizes.kept_bytes(tokens, recompute, division.tensor, division.along, scores)


def moment_bytes(job: Job, division: Division) -> float:
    """The bytes that are there for a moment only: a layer computed again, and gradients of its widest result."""
    sizes, tokens = job.sizes, rank_tokens(job, division)
    width = job.parameter_bytes / 2
    again = 0.0
    if division.recompute == "full":
        again = _kept(job, division, sizes, "none")
    elif division.recompute == "selective" and not job.fused_attention:
        again = 5 * sizes.heads * sizes.seq * tokens / division.tensor
    if job.quantized:  # the largest matrix, as a product reads it
        largest = max(sizes.attention_products[0], sizes.hidden * sizes.ffn_width)
        again += 2 * largest / division.tensor
    wide = 2 * tokens * max(sizes.ffn_width, sizes.hidden) / division.tensor * (2 if sizes.gated else 1)
    return (again + wide) * width
