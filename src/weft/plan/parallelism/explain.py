"""Each term of a plan's step and memory, with its formula in words and numbers."""

from __future__ import annotations

from weft.plan.parallelism.job import SHARDED, Job
from weft.plan.parallelism.memory import LAYERS_HERE, held
from weft.plan.parallelism.search import Plan

Term = tuple[str, float, str]
"""(name, value, formula)"""


def step_terms(job: Job, plan: Plan) -> list[Term]:
    """The terms of a step in seconds; those that begin with a dash are parts of the one before."""
    step, one = plan.step, plan.division
    layer, many = step.layer, step.microbatches
    layers = step.layers * many
    parts = {
        "- products": (
            layer.products.total,
            "2 FLOPs a number of the matrices and token, three times, over tensor",
        ),
        "- attention": (layer.attention.total, "4 b s^2 a d, half if fused, 3.5 or 3 times"),
        "- between products": (layer.between.total, "bytes read and written over bandwidth"),
        "- tensor-parallel sums": (
            layer.exchange.total,
            "two all-reduces of b s h in each pass, what is not hidden",
        ),
        "- computed again": (layer.again, one.recompute),
    }
    experts = job.sizes.experts
    if experts is not None:
        met = f"{experts.per_token} of {experts.count} experts a token"
        parts["- products"] = (
            layer.products.total, f"2 FLOPs a number that a token meets ({met}), three times, over tensor"
        )  # fmt: skip
        parts["- all-to-all of experts"] = (
            layer.dispatch.total, f"two in each pass of b s {experts.per_token} h, over {one.experts} replicas"
        )  # fmt: skip
    head = max(0.0, step.work - layers * layer.total.total)
    work = (
        f"{many} microbatches x {step.busiest.total:.4g} s on the busiest rank, with {step.layers:g} layers"
    )
    ranks = one.alike
    return [
        ("work", step.work, work),
        *((name, seconds * layers, formula) for name, (seconds, formula) in parts.items()),
        ("- head and loss", head, "2 b s h V three times, logits of 32 bits; on the last rank only"),
        (
            "bubble",
            step.bubble,
            f"{one.schedule}, {one.pipeline} ranks in a row, stages of each: {one.chunks}",
        ),
        ("crossings", step.crossings, "b s h over the link, each microbatch there and back"),
        ("replicas, exposed", step.exposed, f"{one.sharded} of {ranks} ranks, while nothing is computed"),
        ("replicas, hidden", step.beside, "the same beside computation; not in the sum"),
        ("optimizer", step.optimizer, "gradients, states, parameters read and written"),
        ("late ranks", plan.seconds * step.late / (1 + step.late), f"spread x sqrt(2 ln {one.ranks})"),
        ("step", plan.seconds, "the sum"),
    ]


def memory_terms(job: Job, plan: Plan) -> list[Term]:
    """The terms of the fullest rank's memory, in bytes."""
    memory, one = plan.memory, plan.division
    many = held(one, plan.step.microbatches)
    shared = f", shared by {one.alike} ranks"
    if one.experts > 1:
        shared += f", experts by {one.alike_experts}"
    sizes = job.sizes
    spread = (
        f"; {sizes.experts.count // one.experts} of {sizes.experts.count} experts" if sizes.experts else ""
    )
    whole, states = (shared if one.sharded in kinds else "" for kinds in (SHARDED[2:], SHARDED[1:]))
    adapters = f" of adapters of rank {job.lora}" if job.lora else ""
    away = ", in host memory" if job.offload_optimizer else ""
    waiting = f"; of all but {LAYERS_HERE} layers in host memory" if job.offload_weights else ""
    return [
        ("parameters", memory.parameters, f"{job.linear_bytes:g} bytes each{whole}{spread}{waiting}"),
        ("gradients", memory.gradients, f"{job.gradient_bytes} bytes each{adapters}{whole}"),
        (
            "optimizer states",
            memory.states,
            f"{job.optimizer}: {job.state_bytes} bytes for each parameter{adapters}{states}{away}",
        ),
        ("activations", memory.activations, f"{many:.3g} microbatches held, recomputation: {one.recompute}"),
        (
            "for a moment",
            memory.moment,
            "a layer computed again, gradients of its widest result; or gradients once more, when replicas add them up",
        ),
        ("reserved", memory.reserved, "driver, libraries, buffers of collectives"),
        ("sum", memory.total, ""),
    ]
