"""The choice of modules to open, and of each unit's partition.

Finer units balance better and cost more: every opened module's glue is intercepted on every rank, and a cut inside a
block sends more tensors. So several granularities are tried; for each the placement is exact (``partition.chain``),
modules whose units all landed together are closed again, and what is left is judged by

    largest partition's cost  +  (1 - memory_weight) * (calls + crossings) / time of the whole

where every rank follows every call of a unit and every operation of the glue, and a tensor that crosses brings a
gradient back. A placement that leaves partitions without parameters is taken only where no other leaves fewer:
whoever asks for partitions wants the model divided, even a small one that is quicker in one place. Then single units
are opened as long as that helps. A later partition's cost may include a part of its wait for those before it
(``plan.fill_drain_skew``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.config import Settings
from weft.graph.model import Graph
from weft.partition.chain.chain import split
from weft.partition.cost import unit_costs
from weft.plan.fill_drain_skew import least_step, shift_cuts
from weft.plan.measured.rebalanced import by_speed
from weft.plan.v_apex import turns
from weft.torch.split.unit_tree import Piece, Tree
from weft.torch.tensors.pytree import bytes_of
from weft.torch.trace.record import Record

GRAINS = (1.0, 0.5, 0.25, 0.125, 0.0625)
MOVABLE = 0.5
"""Units that move to other ranks later are not to take more than this of an even stage, as far as modules open."""
CALL_S = 50e-6
"""What a call of a unit or an operation of the glue costs each rank, seconds: measured in steps of a GPT on two."""
MICROBATCH_S = 2e-3
"""What a microbatch costs in each stage besides: its thread, the glue's mode, a cold cache. It is more than a
rank's only stage takes (1 ms), as visits of several cost more than a trace sees."""
CROSSING_S = 200e-6
"""What a tensor that crosses and its gradient cost each rank besides their bytes: an estimate from steps."""
BYTES_PER_S = 4e9
"""How fast a rank copies what crosses into shared memory or out of it: likewise; a loop of its own is faster."""
FINE = 0.125
"""For a V whose turn is one stage modules are opened that take more than this of an even stage."""
DEARER = 0.02
"""It is not cut where what crosses costs more than at the cheapest place by this part of the whole time."""
ROUNDS = 4
CANDIDATES = 12


@dataclass
class Choice:
    """Units (``pieces``), the stage of each and its partition; :func:`choose` takes the fewest ``idle``, partitions
    without parameters, then the least ``score``. ``calls``: those of units and glue that every rank follows for a
    microbatch; ``crossing_s``: what its crossings cost a rank."""

    opened: frozenset[str]
    pieces: list[Piece]
    stages: list[int]
    partitions: list[int]
    costs: list[float]
    score: float
    calls: int = 0
    crossing_s: float = 0.0
    idle: int = 0

    def beats(self, other: Choice, by: float) -> bool:
        """True if it leaves fewer partitions idle, or as many at a score that is smaller ``by`` so much."""
        return self.idle < other.idle or (self.idle == other.idle and self.score < other.score - by)


def choose(
    tree: Tree, settings: Settings, partition_of_stage: Sequence[int] | None = None, late: float = 0.0
) -> Choice:
    """The best choice found; deterministic for a given trace.

    ``partition_of_stage``: one stage each by default; ``late``: what part of the loads before it counts with each
    stage's own (:func:`~weft.plan.fill_drain_skew.least_step`).
    """
    layout = list(partition_of_stage or range(settings.partitions))
    tried: dict[frozenset[str], Choice] = {}

    def attempt(opened: set[str]) -> Choice:
        known = frozenset(opened)
        if known not in tried:
            tried[known] = _place(tree, set(known), settings, layout, late=late)
        return tried[known]

    best: Choice | None = None
    for grain in (grain for grain in GRAINS if grain <= MOVABLE or not settings.rebalance):
        option = attempt(_larger(tree, grain / len(layout)))
        if best is None or option.beats(best, 1e-9):
            best = option
    assert best is not None
    for _ in range(ROUNDS):
        better = min(
            (attempt(set(best.opened) | {name}) for name in _candidates(tree, best)),
            key=lambda option: (option.idle, option.score),
            default=best,
        )
        if not better.beats(best, 1e-4):
            break
        best = better
    return best


def _larger(tree: Tree, part: float) -> set[str]:
    """The modules that may be opened and take more than this part of the whole time, or must be opened."""
    total = sum(_weight_of(record) for record in tree.records.values()) or 1.0
    return {
        name
        for name in tree.records
        if name
        and tree.openable(name)
        and not tree.writes(name)
        and (sum(map(_weight_of, tree.subtree(name))) > part * total or tree.must_open(name))
    }


def _weight_of(record: Record) -> float:
    return record.forward_s + record.backward_s


def _candidates(tree: Tree, choice: Choice) -> list[str]:
    """Units worth opening: beside a cut, the most expensive, and tied ones (only a part may be tied)."""
    pieces = choice.pieces
    names: dict[str, None] = {}
    fixed = [(piece, at, cost) for piece, at, cost in zip(pieces, choice.stages, choice.costs, strict=True)]
    for (one, at, _), (other, to, _) in zip(fixed, fixed[1:], strict=False):
        if at != to:
            names[one.name] = names[other.name] = None
    for piece, _, _ in sorted(fixed, key=lambda item: -item[2])[:4]:
        names[piece.name] = None
    for piece in pieces:
        if piece.tied is not None:
            names[piece.name] = None
    return [name for name in names if tree.openable(name) and not tree.writes(name)][:CANDIDATES]


def turn_choices(tree: Tree, settings: Settings, layout: Sequence[int], most: int) -> Iterator[Choice]:
    """Choices for a V whose turn is one stage, with first stages of different sizes; at most so many.

    Large modules are opened, but not cut where that sends much more than elsewhere; tied units lie on one rank.
    """
    opened = _larger(tree, FINE / len(layout))
    pieces = [piece for piece in tree.pieces(opened) if not piece.floating]
    home = homes(tree, pieces)
    cuts_s = [sum(map(_crossing_s, sizes)) for sizes in tree.trace.operations.at_cuts(home, len(pieces))]
    dear_s = min(cuts_s, default=0.0) + DEARER * sum(piece.unit.time_ms for piece in pieces) / 1e3
    firsts = [0, *(number for number, cut_s in enumerate(cuts_s, 1) if cut_s <= dear_s)]
    costs = piece_costs(pieces, settings)
    merged = [sum(costs[one:other]) for one, other in zip(firsts, [*firsts[1:], len(pieces)], strict=True)]
    part_of = [bisect_right(firsts, number) - 1 for number in range(len(pieces))]
    for parts in turns(merged, settings.partitions, most):
        stages = [parts[part] for part in part_of]
        groups: dict[int | None, set[int]] = {}
        for piece, stage in zip(pieces, stages, strict=True):
            groups.setdefault(piece.tied, set()).add(layout[stage])
        if all(len(ranks) == 1 for tied, ranks in groups.items() if tied is not None):
            yield _place(tree, set(opened), settings, list(layout), stages)


def _place(
    tree: Tree,
    opened: set[str],
    settings: Settings,
    layout: list[int],
    stages: list[int] | None = None,
    late: float = 0.0,
) -> Choice:
    """The units on their stages, and what that costs. Modules that need not be open are closed again.

    ``stages``: where the units go; by default as even as ``late`` wants them.
    """
    pieces = [piece for piece in tree.pieces(opened) if not piece.floating]
    costs = piece_costs(pieces, settings)
    if stages is None and settings.speeds:
        stages = [*by_speed(graph_of(pieces), settings.speeds, layout, settings.memory_weight)]
    elif stages is None:
        groups = [piece.tied for piece in pieces]
        stages = shift_cuts(costs, split(costs, len(layout), groups), len(layout), late, groups)
    closed = opened if settings.rebalance else _close(tree, opened, pieces, stages)
    if closed != opened:
        where = {piece.name: at for piece, at in zip(pieces, stages, strict=True)}
        opened = closed
        pieces = [piece for piece in tree.pieces(opened) if not piece.floating]
        costs = piece_costs(pieces, settings)
        stages = [_where(tree, piece, where) for piece in pieces]
    partitions = [layout[stage] for stage in stages]
    loads = [0.0] * settings.partitions
    for at, cost in zip(partitions, costs, strict=True):
        loads[at] += cost / (settings.speeds[at] if settings.speeds else 1.0)
    time_s = sum(piece.unit.time_ms for piece in pieces) / 1e3 or 1.0
    calls = len(pieces) + sum(record.operations for record in tree.glue(tree.pieces(opened)))
    home = homes(tree, pieces)
    crossing_s = sum(map(_crossing_s, tree.trace.operations.crossing(home, partitions)))
    extra_s = CALL_S * calls + crossing_s
    score = least_step(loads, late) + (1.0 - settings.memory_weight) * extra_s / time_s + 1e-6 * len(pieces)
    holding = {
        at for at, unit in zip(partitions, graph_of(pieces).units, strict=True) if unit.parameter_bytes
    }
    idle = settings.partitions - len(holding)
    return Choice(frozenset(opened), pieces, stages, partitions, costs, score, calls, crossing_s, idle)


def homes(tree: Tree, pieces: list[Piece]) -> dict[str, int]:
    """The number of the unit that each module belongs to."""
    return {part.name: number for number, piece in enumerate(pieces) for part in tree.subtree(piece.name)}


def _crossing_s(size: int) -> float:
    """The seconds that a tensor of ``size`` bytes and its gradient cost where they cross."""
    return CROSSING_S + 2 * size / BYTES_PER_S


def _where(tree: Tree, piece: Piece, where: dict[str, int]) -> int:
    for part in tree.subtree(piece.name):
        if part.name in where:
            return where[part.name]
    return 0


def _close(tree: Tree, opened: set[str], pieces: list[Piece], partitions: list[int]) -> set[str]:
    """Without the modules whose units lie on one partition all the same, and that have no parameters elsewhere."""
    where = {piece.name: at for piece, at in zip(pieces, partitions, strict=True)}
    still = set(opened)
    for name in sorted(opened, key=lambda n: -n.count(".")):
        inside = {where[part.name] for part in tree.subtree(name) if part.name in where}
        if (
            not tree.must_open(name)
            and len(inside) <= 1
            and _has_its_parameters(tree, name, pieces, where, inside)
        ):
            still.discard(name)
    return still


def _has_its_parameters(
    tree: Tree, name: str, pieces: list[Piece], where: dict[str, int], inside: set[int]
) -> bool:
    """True if the parameters of an opened module, its own and those that others have too, lie where its units lie."""
    own = {id(parameter) for parameter in tree.records[name].module.parameters()}
    return bool(inside) and all(
        where[piece.name] in inside for piece in pieces if not own.isdisjoint(piece.parameters)
    )


def piece_costs(pieces: list[Piece], settings: Settings) -> list[float]:
    """The normalised cost of each unit; shared parameters count once."""
    return unit_costs(graph_of(pieces), settings.memory_weight, max(1, (settings.partitions + 1) // 2))


def graph_of(pieces: list[Piece]) -> Graph:
    """The units as the pure core sees them. A parameter counts in the first unit that has it."""
    seen: set[int] = set()
    units = []
    for piece in pieces:
        own = [p for number, p in piece.parameters.items() if number not in seen]
        seen.update(piece.parameters)
        units.append(
            replace(
                piece.unit,
                parameter_bytes=sum(map(bytes_of, own)),
                parameters=sum(p.numel() for p in own),
                group=None if piece.tied is None else f"tied{piece.tied}",
            )
        )
    return Graph(tuple(units))
