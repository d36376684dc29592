"""What the fullest rank needs: parameters, gradients, optimizer states, activations, and what is in use for a moment.

N are the parameters of the rank (its layers and ends, over t), d the replicas that share them.

    parameters     N x 2 bytes (4 in 32 bits)           over d if parameters are sharded, with two layers gathered
    gradients      N x 4 bytes (or 2)                   over d if parameters are sharded
    states         N x 12 bytes for Adam with a copy    over d if states or parameters are sharded
                   of 32 bits
    activations    see `activation_bytes`

The 18 bytes without sharding are those of mixed precision with Adam (Rajbhandari et al., arXiv 1910.02054, section 3.1,
has 16: gradients in 16 bits).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.layer import rank_tokens
from weft.plan.parallelism.shares import Part, Shares, shares
from weft.plan.parallelism.step import rank_parameters

RESERVED = 2 * 2**30
"""Bytes of a device that its driver, its libraries and the buffers of collectives take before training begins."""
LOST = 0.04
"""Share of a device's memory that an allocator loses between blocks."""


@dataclass(frozen=True)
class Memory:
    """What the fullest rank needs, in bytes, by what it is for."""

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
    """What of a device's memory training can use."""
    return memory_bytes * (1 - LOST)


def memory_of(job: Job, division: Division, shared: Shares | None = None) -> Memory:
    """What the fullest rank of a pipeline needs: mostly the first one, which holds most microbatches.

    `shared`: layers of each rank (`StepTimes.shares`); as even as can be, with a head that costs nothing, if not given.
    """
    found = shared or shares(job.sizes.layers, division, 0.0)
    return max((_rank_memory(job, division, part) for part in found.parts), key=lambda one: one.total)


def _rank_memory(job: Job, division: Division, part: Part) -> Memory:
    """What one rank needs."""
    numbers = rank_parameters(job, division, part)
    sharing = division.data * division.context
    whole = sharing if division.sharded == "parameters" else 1
    states = sharing if division.sharded != "none" else 1
    gathered = 2 * job.sizes.layer_parameters / division.tensor * job.parameter_bytes if whole > 1 else 0.0
    return Memory(
        numbers * job.parameter_bytes / whole + gathered,
        numbers * job.gradient_bytes / whole,
        numbers * job.state_bytes / states,
        activation_bytes(job, division, part),
        moment_bytes(job, division),
    )


def held(division: Division, microbatches: int, place: int = 0) -> float:
    """How many microbatches' activations a rank holds at once, in units of all its layers; r is its place in the row.

        simple         m
        interleaved    min(m, p - r)                       Narayanan et al., arXiv 2104.04473, section 2.2
        looped         p (1 + (p - 1 - 2 r) / (p v))       Korthikanti et al., arXiv 2205.05198, 4.2.3, for r = 0
        zb_h1, zb_v    p                                   Qi et al., arXiv 2401.10241; sail-sg
        zb_2p          2 p - 1                             the same

    >>> held(Division(pipeline=8, chunks=3, schedule="looped"), 64)
    10.333333333333334
    """
    ranks, chunks = division.pipeline, division.chunks
    if ranks == 1:
        return 1.0
    most = {
        "simple": float(microbatches),
        "interleaved": float(ranks - place),
        "looped": ranks + (ranks - 1 - 2 * place) / chunks,
        "zb_2p": 2.0 * ranks - 1,
    }.get(division.schedule, float(ranks))
    return min(float(microbatches), most)


def activation_bytes(job: Job, division: Division, part: Part) -> float:
    """What waits for its backward pass on a rank, in bytes (arXiv 2205.05198, section 4).

    its layers x microbatches held x bytes of a layer, + as many embeddings' masks on the first rank, + the head's, of
    one microbatch, on the last
    """
    sizes, tokens = job.sizes, rank_tokens(job, division)
    width = job.parameter_bytes / 2
    one = sizes.kept_bytes(
        tokens, division.recompute, division.tensor, division.along, scores=not job.fused_attention
    )
    many = held(division, division.microbatches(job), part.place)
    ends = many * sizes.embedding_bytes(tokens, division.tensor) if part.embedding else 0.0
    ends += sizes.head_bytes(tokens, division.tensor) if part.head else 0.0
    return (many * part.layers * one + ends) * width


def moment_bytes(job: Job, division: Division) -> float:
    """What is there for a moment only, in bytes: a layer computed again, and gradients of its widest result."""
    sizes, tokens = job.sizes, rank_tokens(job, division)
    again = 0.0
    if division.recompute == "full":
        again = sizes.kept_bytes(
            tokens, "none", division.tensor, division.along, scores=not job.fused_attention
        )
    elif division.recompute == "selective" and not job.fused_attention:
        again = 5 * sizes.heads * sizes.seq * tokens / division.tensor
    return again + 2 * tokens * max(sizes.ffn, sizes.hidden) / division.tensor * (2 if sizes.gated else 1)
