"""Random legal steps, and a second way to simulate them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from hypothesis import strategies as st

from weft.schedule.schedule import Action
from weft.simulate import Edge, StageCost


def rows(*texts):
    """A list of actions for each rank, from texts such as "0F0 0B0"."""
    return [[Action.parse(each) for each in text.split()] for text in texts]


class Case(NamedTuple):
    """What `simulate` takes; no send ever blocks, so the lists need not suit blocking sends."""

    actions: list[list[Action]]
    rank_of_stage: list[int]
    costs: list[StageCost]
    edges: list[Edge]


def needed(action, there, stages, edges):
    """Those of `there` that must be done before `action`, wherever they run: the table of the legality check."""
    stage, kind, microbatch = action

    def backward(of):
        whole = Action(of, "B", microbatch)
        return whole if whole in there else Action(of, "I", microbatch)

    if kind == "F":
        before = [stage - 1] * (stage > 0) + [edge.source for edge in edges if edge.target == stage]
        return [Action(source, "F", microbatch) for source in before]
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    after = [stage + 1] * (stage < stages - 1) + [edge.target for edge in edges if edge.source == stage]
    return [Action(stage, "F", microbatch), *map(backward, after)]


@st.composite
def cases(draw, least=0, size=None):
    """Stages on any ranks, B or I and W, extra edges, any order that can be run.

    Costs are from `least` to 9 seconds, and tensors of `size` bytes, or of any size.
    """
    stages, ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages))
    sizes = st.integers(0, 50) if size is None else st.just(size)
    costs = []
    for _ in range(stages):
        times = [draw(st.integers(least, 9)) for _ in range(4)]
        kept = draw(sizes)
        costs.append(
            StageCost(*times, draw(sizes), draw(sizes), kept, draw(st.integers(0, kept)), draw(sizes))
        )
    edges = []
    if stages > 1:
        for _ in range(draw(st.integers(0, 2))):
            source = draw(st.integers(0, stages - 2))
            edges.append(Edge(source, draw(st.integers(source + 1, stages - 1)), draw(sizes)))
    todo = []
    for stage in range(stages):
        kinds = "FIW" if draw(st.booleans()) else "FB"
        todo += [Action(stage, kind, i) for kind in kinds for i in range(microbatches)]
    random = draw(st.randoms(use_true_random=False))
    missing = {action: set(needed(action, set(todo), stages, edges)) for action in todo}
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    while missing:
        chosen = random.choice([action for action, before in missing.items() if not before])
        actions[owners[chosen.stage]].append(chosen)
        del missing[chosen]
        for before in missing.values():
            before.discard(chosen)
    return Case(actions, owners, costs, edges)


def longest_paths(case, transfer_s):
    """When each action ends: the longest path to it through the graph of actions.

    `transfer_s(sender, receiver, bytes)` is the time from one rank to another.
    """
    place = {action: (rank, i) for rank, row in enumerate(case.actions) for i, action in enumerate(row)}

    def duration(action):
        cost = case.costs[action.stage]
        times = {"F": cost.forward_s, "B": cost.backward_s, "I": cost.input_s, "W": cost.weight_s}
        return times[action.kind]

    def sizes(source, target):
        """The sizes of all that goes from one action to the other."""
        forward, (first, last) = target.kind == "F", sorted((source.stage, target.stage))
        chain = case.costs[first].forward_bytes if forward else case.costs[last].backward_bytes
        yield from [chain] * (last == first + 1)
        yield from (edge.bytes for edge in case.edges if (edge.source, edge.target) == (first, last))

    @cache
    def end(action):
        rank, i = place[action]
        start = end(case.actions[rank][i - 1]) if i else 0
        for before in needed(action, place, len(case.costs), case.edges):
            owner = case.rank_of_stage[before.stage]
            if owner != rank:
                slowest = max(transfer_s(owner, rank, size) for size in sizes(before, action))
                start = max(start, end(before) + slowest)
        return start + duration(action)

    return [[end(action) for action in row] for row in case.actions]
