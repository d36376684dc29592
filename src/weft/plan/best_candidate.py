"""The placement with the shortest step: each candidate is run in simulation, by the schedule that its stages allow.

A placement whose stages are those of the asked schedule (0 1 2 3 for `1f1b`) runs by its pattern. Where
microbatches come back to a partition, no pattern fits, and list scheduling runs the stages as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.config import Settings
from weft.errors import PlacementError, UsageError
from weft.graph.model import Graph
from weft.partition.balanced.candidate import Candidate
from weft.partition.balanced.levels import stages_of_placement
from weft.plan.chosen import Chosen
from weft.plan.option import Option, Placed
from weft.plan.search import Found, merit, search
from weft.plan.stages import always, on_stages
from weft.schedule.table import KINDS, having
from weft.simulate import Links
from weft.units import format_bytes

LIST = Option("list", like="1f1b")
"""What runs any stages."""


@dataclass(frozen=True)
class Best:
    """The candidate with the shortest step.

    Attributes:
        candidate: The placement: `candidate.partitions` has the partition of each unit.
        stage_of_unit: The stage of each unit.
        chosen: Its schedule with the rank of each stage, the costs of its stages, the predicted step, and the table of
            all candidates as `reasons`.
        fault: Why it cannot run within the memory; empty if it can.
    """

    candidate: Candidate
    stage_of_unit: tuple[int, ...]
    chosen: Chosen
    fault: str = ""


def asked_options(settings: Settings) -> tuple[Option, ...]:
    """The options by which a job's `pipeline` lets a placement run, where backward passes cannot be split in two.

    Raises:
        UsageError: If that schedule splits them, or comes from a file.

    >>> asked_options(Settings(partitions=2, pipeline="gpipe"))
    (Option(schedule='gpipe', ...),)
    """
    name = settings.pipeline
    kind = KINDS[name]
    if name == "file" or kind.splits:
        why = "comes from a file" if name == "file" else "splits backward passes in two"
        fit = ", ".join(having(lambda other: not other.splits and other.generate is not None or other.timed))
        raise UsageError(
            f'pipeline is "{name}", which {why}: stages made of operations do not allow that, write one of {fit}'
        )
    if kind.timed:
        patterns = () if name == "list" else (Option("1f1b"), Option("gpipe"))
        return (*patterns, LIST)
    return (
        Option(
            name,
            chunks=settings.chunks if kind.free_chunks else None,
            active=settings.active_microbatches if kind.limited else None,
        ),
    )


def best_by_step(
    graph: Graph,
    candidates: Sequence[Candidate],
    ranks: int,
    microbatches: int,
    links: Links,
    *,
    options: Sequence[Option] = (Option("1f1b"),),
    memory_bytes: Sequence[int] | None = None,
    copies: int = 4,
    ahead: int | None = 0,
    speeds: Sequence[float] = (),
) -> Best:
    """The candidate whose simulated step is the shortest; the first of equal ones.

    Each further stage on a rank must gain a part of the step, as for all choices (see `weft.plan.search.merit`).
    Candidates that do not fit the memory come last.

    Args:
        graph: The units.
        candidates: Placements on `ranks` partitions.
        ranks: How many ranks there are.
        microbatches: How many microbatches make the step.
        links: How tensors go from rank to rank.
        options: What may run them; see `asked_options`.
        memory_bytes: What each rank may take; any amount if not given.
        copies: How often parameters count in the memory.
        ahead: How many more (stage, microbatch) than its list a rank may hold; see `weft.plan.search.search`.
        speeds: How fast each rank is; 1 if not given.

    Raises:
        PlacementError: If there is no candidate.
    """
    found: list[tuple[Found, Candidate, tuple[int, ...]]] = []
    for candidate in candidates:
        stages, layout = stages_of_placement(graph, candidate.partitions, ranks)
        placed = on_stages(graph, stages, layout, speeds=speeds, placement=candidate)
        tried = list(dict.fromkeys(_fitting(option, ranks, placed) for option in options))
        results = search(
            ranks, microbatches, always(placed), links,
            memory_bytes=memory_bytes, tried=tried, copies=copies, ahead=ahead,
        )  # fmt: skip
        found += [(one, candidate, stages) for one in results]
    found = sorted((one for one in found if one[0].schedule is not None), key=lambda one: merit(one[0]))
    if not found:
        raise PlacementError("no candidate can be run: give at least one placement, and enough memory for it")
    best, candidate, stages = found[0]
    return Best(candidate, stages, Chosen.of(best, links, table([one for one, *_ in found])), best.fault)


def _fitting(option: Option, ranks: int, placed: Placed) -> Option:
    """The option, or list scheduling if its stages are not those of the placement."""
    if option.like is not None or option.layout(ranks) == placed.rank_of_stage:
        return option
    return LIST


def table(found: Sequence[Found]) -> str:
    """A table of candidates, a line each: cut, imbalances, stages, schedule, step."""
    rows = [["placement", "cut", "imbalance", "stages", "schedule", "step ms", ""]]
    for one in found:
        assert one.placed is not None
        candidate = one.placed.placement
        shares = ", ".join(f"{name} {share:.2f}" for name, share in candidate.imbalances)
        stages = str(len(one.placed.stages))
        step = f"{one.step_s * 1e3:.3f}"
        rows.append(
            [
                candidate.name,
                format_bytes(candidate.cut_bytes),
                shares,
                stages,
                str(one.option),
                step,
                one.fault,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
