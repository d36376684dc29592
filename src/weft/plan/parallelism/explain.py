"""Each term of a plan's step and memory, with its formula in words and numbers."""

from __future__ import annotations

from weft.plan.parallelism.job import Job
from weft.plan.parallelism.memory import held
from weft.plan.parallelism.search import Plan

Term = tuple[str, float, str]
"""(name, value, formula)"""


def step_terms(job: Job, plan: Plan) -> list[Term]:
    """The terms of a step in seconds; those that begin with a dash are parts of the one before."""
    step, one = plan.step, plan.division
    layer, many = step.layer, step.microbatches
    layers = job.sizes.layers / one.pipeline * many
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
    ranks = one.data * one.context
    return [
        ("work", step.work, f"{many} microbatches x {step.busiest.total:.4g} s on the busiest rank"),
        *((name, seconds * layers, formula) for name, (seconds, formula) in parts.items()),
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
    """What the fullest rank needs, in bytes."""
    memory, one = plan.memory, plan.division
    many = held(one, plan.step.microbatches)
    over = {"none": "", "optimizer": " (states)", "parameters": " (all three)"}[one.sharded]
    shared = f", shared by {one.data * one.context} ranks{over}" if over else ""
    return [
        ("parameters", memory.parameters, f"{job.parameter_bytes} bytes each{shared}"),
        ("gradients", memory.gradients, f"{job.gradient_bytes} bytes each"),
        ("optimizer states", memory.states, f"{job.optimizer}: {job.state_bytes} bytes for each parameter"),
        ("activations", memory.activations, f"{many:.3g} microbatches held, recomputation: {one.recompute}"),
        ("for a moment", memory.moment, "a layer computed again, gradients of its widest result"),
        ("reserved", memory.reserved, "driver, libraries, buffers of collectives"),
        ("sum", memory.total, ""),
    ]
