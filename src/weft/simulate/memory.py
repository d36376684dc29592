"""Peak memory by rank. It follows from the order of the actions alone, whatever they cost.

    bytes(rank) = copies * parameters of its stages + the largest sum of what is kept

    F(s)   keeps activation_bytes(s), from its start
    B(s)   lets go of them, at its end
    I(s)   lets go of all but weight_bytes(s), at its end
    W(s)   lets go of these, at its end

B(s) and I(s) take transient_bytes(s) besides while they run: what is computed anew. Whatever else an action
needs only while it runs, and tensors on their way, are not counted.

Where microbatches come back to ranks that they have left, a rank holds a given number of them, whatever its list says.

Where activations of waiting microbatches are offloaded, a rank keeps no more than those of two: of the one that runs,
and of the next one, which is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.schedule.schedule import Action
from weft.simulate.costs import StageCost

COPIES = 4
"""Parameters, gradients and the two moments of an Adam-like optimizer."""


def kept_bytes(actions: Sequence[Action], costs: Sequence[StageCost]) -> int:
    """The most that a rank keeps between its forward and backward passes, in bytes.

    >>> text = "0F0 0F1 0I0 0F2 0W0 0B1 0B2"
    >>> kept_bytes([Action.parse(one) for one in text.split()], [StageCost(activation_bytes=10, weight_bytes=4)])
    24
    """
    kept = peak = 0
    for stage, kind, _ in actions:
        cost = costs[stage]
        if kind == "F":
            kept += cost.activation_bytes
        elif kind == "W":
            kept -= cost.weight_bytes
        else:
            peak = max(peak, kept + cost.transient_bytes)
            kept -= cost.activation_bytes
            if kind == "I":
                kept += cost.weight_bytes
        if kept > peak:
            peak = kept
    return peak


def peak_bytes(
    actions: Sequence[Sequence[Action]],
    rank_of_stage: Sequence[int],
    costs: Sequence[StageCost],
    copies: int = COPIES,
    offloads: bool = False,
    held: int = 0,
) -> tuple[int, ...]:
    """The peak of each rank's device, in bytes.

    Args:
        actions: For each rank its list.
        rank_of_stage: The rank that runs each stage.
        costs: What each stage costs.
        copies: How often the parameters count: themselves, gradients, optimizer state.
        offloads: Whether activations of microbatches that wait are elsewhere.
        held: How many microbatches a rank holds; as many as its list has it if 0.
    """
    parameters, most, of_one = ([0] * len(actions) for _ in range(3))
    transient = [0] * len(actions)
    for rank, cost in zip(rank_of_stage, costs, strict=True):
        parameters[rank] += cost.parameter_bytes
        kept_by_one = max(cost.activation_bytes, cost.weight_bytes)
        most[rank] = max(most[rank], 2 * kept_by_one + cost.transient_bytes)
        of_one[rank] += kept_by_one
        transient[rank] = max(transient[rank], cost.transient_bytes)
    kept = [kept_bytes(of_rank, costs) for of_rank in actions]
    if held:
        kept = [held * size + more for size, more in zip(of_one, transient, strict=True)]
    if offloads:
        kept = list(map(min, kept, most))
    return tuple(copies * own + other for own, other in zip(parameters, kept, strict=True))
