"""The partition of each unit, and the schedule: decided on one rank, and sent to all as text."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from weft import schedule
from weft.config import Settings
from weft.errors import DivergenceError, PlacementError
from weft.partition import Placement, Problem
from weft.partition.balanced import balances, candidates, metis
from weft.partition.balanced.candidate import Balance, Candidate
from weft.plan.best_candidate import asked_options, best_by_step
from weft.plan.chosen import schedule_for
from weft.plan.option import Option
from weft.plan.stages import Placer
from weft.schedule import Schedule
from weft.schedule.legal import check
from weft.schedule.table import KINDS
from weft.session.collectives import agree_on, gather_texts
from weft.simulate import Links, as_weft_runs
from weft.tensorflow.session.session import Session
from weft.tensorflow.split.units import Units
from weft.tensorflow.trace.operations import Record
from weft.topology.cluster import Link
from weft.untrusted import read_text

log = logging.getLogger("weft")

LINK = Link(latency_s=1e-4, bytes_per_s=2e9)
"""Between two ranks of one host, as far as nobody has measured it."""


@dataclass(frozen=True)
class Decision:
    """Where the units of a step go.

    Attributes:
        partitions: The partition of each unit.
        stage_of_unit: The stage of each unit.
        stages: The partition of each stage.
        actions: The schedule, as CSV.
        name: The schedule's name.
        step_s: What the step was predicted to take.
        reasons: Why, in words; empty where nothing was compared.
    """

    partitions: tuple[int, ...]
    stage_of_unit: tuple[int, ...]
    stages: tuple[int, ...]
    actions: str
    name: str
    step_s: float
    reasons: str = ""

    def to_json(self) -> str:
        """The text that :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """The decision of rank 0."""
        record: dict[str, Any] = json.loads(text)
        for name, value in record.items():
            record[name] = tuple(value) if isinstance(value, list) else value
        return cls(**record)

    @property
    def schedule(self) -> Schedule:
        """The actions of each rank."""
        return Schedule(self.name, schedule.from_csv(self.actions).ranks, self.stages)


def agree(
    session: Session, units: Units, record: Record, owners: Mapping[int, int], microbatches: int
) -> Decision:
    """The decision of the pipeline's first rank, on every rank of it; all pipelines decide alike.

    Args:
        session: The session.
        units: The units of the step.
        record: Its operations.
        owners: The partition of each variable that has one already, by its number.
        microbatches: How many there are.

    Raises:
        DivergenceError: The ranks have traced different steps; the first difference is named.
        PlacementError: The units cannot be placed; on every rank.
    """
    compare_graphs(session, record)
    fixed = {
        units.graph.units[unit].name: owners[variable]
        for variable, using in units.owners.items()
        if variable in owners
        for unit in using
    }
    settings = session.settings
    text = agree_on(
        session, session.port("pp"), lambda: decide(settings, units, fixed, microbatches).to_json(), "the partition",
        session.peers("pp")[0],
    )  # fmt: skip
    return Decision.from_json(text)


def compare_graphs(session: Session, record: Record) -> None:
    """All ranks of a pipeline must have traced the same operations.

    Raises:
        DivergenceError: They have not; on every rank.
    """
    ranks = session.peers("pp")
    if len(ranks) == 1:
        return
    lines = [
        f"{each.kind} {each.inputs} {each.sizes} {_kind_of(record, each.variable)}"
        for each in record.operations
    ]  # names have numbers of their own
    mine = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    port = session.port("pp")
    with session.doing("the comparison of graphs"):
        found = gather_texts(mine, port)
        if len(set(found)) == 1:
            return
        shown = [f"{each.kind} ({each.name}, {sum(each.sizes)} bytes)" for each in record.operations]
        graphs = [json.loads(text) for text in gather_texts(json.dumps([lines, shown]), port)]
    other = next(place for place, text in enumerate(found) if text != found[0])
    (first, one), (second, two) = graphs[0], graphs[other]
    pairs = enumerate(zip(first, second, strict=False))
    at = next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))
    mine_is, theirs = (names[at] if at < len(names) else "nothing more" for names in (one, two))
    raise DivergenceError(
        f"the ranks have traced different steps: operation {at} is {mine_is} on rank {ranks[0]}, and {theirs} on rank "
        f"{ranks[other]}. Build the same model and call the step with arguments of the same shapes on every rank"
    )


def _kind_of(record: Record, variable: int) -> str:
    """Whose a variable is, and its size; nothing for no variable."""
    if variable < 0:
        return ""
    return f"{'a model' if record.variables[variable].model else 'the script'} {record.variables[variable].bytes}"


def decide(settings: Settings, units: Units, fixed: Mapping[str, int], microbatches: int) -> Decision:
    """Where the units go, and what runs; on the rank that decides.

    ``fixed``: units whose partition is known, by name.
    """
    links = Links.uniform(LINK)
    if not settings.auto_partition:
        return _best(settings, units, [_by_hand(settings, units, fixed)], microbatches, links)
    if KINDS[settings.pipeline].chunks not in ((1, 1), None) and not fixed or settings.pipeline == "file":
        return _on_layout(settings, units, microbatches, links)
    problem = Problem(units.graph, settings.partitions, fixed=fixed)
    optimize = "memory" if settings.optimize == "memory" else "speed"
    given = balances(units.graph, [len(each) for each in units.members], units.count_variables(), optimize)
    found = [_beside(units, fixed, settings.partitions)] if fixed else []
    if not fixed:
        time = Placer(
            units.graph, settings.partitions, microbatches, links, memory_weight=settings.memory_weight
        )
        with suppress(PlacementError):
            found.append(_candidate("by time", units, time(range(settings.partitions)).placement.partitions))
    found += _candidates(problem, given, settings.contiguous and not fixed)
    counts = units.count_variables()

    def holding(one: Candidate) -> int:
        """The number of partitions that have variables: a small model would be quickest on one rank."""
        return len({at for at, count in zip(one.partitions, counts, strict=True) if count})

    most = max(map(holding, found))
    found = [each for each in found if holding(each) == most]
    return _best(settings, units, found, microbatches, links)


def _candidates(problem: Problem, given: Sequence[Balance], contiguous: bool) -> list[Candidate]:
    """Placements by the balances; contiguous ones if that is asked for and possible."""
    if contiguous:
        try:
            return candidates(problem, given, contiguous=True)
        except PlacementError:
            log.warning(
                "contiguous: units that share variables, or that must be together, keep each partition from being one "
                "run of the model: another split is taken"
            )
    return candidates(problem, given, cut_graph=metis.load())


def _candidate(name: str, units: Units, partitions: Sequence[int]) -> Candidate:
    given = balances(units.graph, [len(each) for each in units.members], units.count_variables(), "speed")
    return Candidate.of(name, units.graph, tuple(partitions), max(partitions, default=0) + 1, given)


def _best(
    settings: Settings, units: Units, found: Sequence[Candidate], microbatches: int, links: Links
) -> Decision:
    """The candidate with the shortest simulated step, and its schedule."""
    limit = [int(settings.memory_limit * (1 << 30))] * settings.partitions if settings.memory_limit else None
    kind = KINDS[settings.pipeline]
    options = asked_options(settings) if kind.chunks in ((1, 1), None) else (Option("1f1b"),)
    best = best_by_step(
        units.graph, found, settings.partitions, microbatches, links, options=options, memory_bytes=limit
    )
    if best.fault:
        log.warning("no placement fits the memory (%s)", best.fault)
    made = best.chosen.schedule
    return Decision(
        tuple(best.candidate.partitions), tuple(best.stage_of_unit), tuple(made.rank_of_stage),
        schedule.to_csv(made), made.name, best.chosen.step_s, best.chosen.reasons if len(found) > 1 else "",
    )  # fmt: skip


def _on_layout(settings: Settings, units: Units, microbatches: int, links: Links) -> Decision:
    """Units on the stages of a schedule that gives each rank several, or of one that the user wrote."""
    if settings.pipeline == "file":
        text = read_text(settings.schedule_file)
        made = schedule.make("file", settings.partitions, microbatches, text=text)
        check(made)
    else:
        made = schedule_for(settings, None, microbatches)
    placed = Placer(
        units.graph, settings.partitions, microbatches, links, memory_weight=settings.memory_weight
    )(made.rank_of_stage)
    stages = placed.rank_of_stage or made.rank_of_stage
    if stages != made.rank_of_stage:
        option = Option("list", like=made.name if made.name in KINDS else "1f1b")
        made = option.actions(settings.partitions, microbatches, placed.stages, links, None, stages)
    placement: Placement = placed.placement
    at = stage_of_units(placement.partitions, placement.segments, stages)
    step = as_weft_runs(made, placed.stages, links, placed.edges)
    return Decision(
        tuple(placement.partitions), at, tuple(stages), schedule.to_csv(made), made.name, step.step_s
    )


def stage_of_units(
    partitions: tuple[int, ...], segments: tuple[int, ...], stages: tuple[int, ...]
) -> tuple[int, ...]:
    """The stage of each unit, never falling: the first one of its partition that has not been left.

    >>> stage_of_units((0, 1, 0), (0, 1, 0), (0, 1, 0))
    (0, 1, 2)
    """
    if all(one <= other for one, other in zip(segments, segments[1:], strict=False)):
        return segments
    found, stage = [], 0
    for partition in partitions:
        while stages[stage] != partition:
            stage += 1
        found.append(stage)
    return tuple(found)


def _by_hand(settings: Settings, units: Units, fixed: Mapping[str, int]) -> Candidate:
    """Units where the script wants them, all others on the default partition."""
    partitions = [
        fixed.get(unit.name, units.by_hand.get(number, settings.default_partition))
        for number, unit in enumerate(units.graph.units)
    ]
    groups: dict[str, int] = {}
    for number, unit in enumerate(units.graph.units):
        if unit.group is not None:
            partitions[number] = groups.setdefault(unit.group, partitions[number])
    return _candidate("by hand", units, partitions)


def _beside(units: Units, fixed: Mapping[str, int], count: int) -> Candidate:
    """Units whose variables lie somewhere already stay there; each other one goes where its last input is made."""
    partitions: list[int] = []
    sources: dict[int, int] = {}
    for source, targets, _ in units.graph.flows:
        for target in targets:
            sources[target] = max(sources.get(target, -1), source)
    for number, unit in enumerate(units.graph.units):
        before = partitions[sources[number]] if number in sources else min(fixed.values())
        partitions.append(fixed.get(unit.name, before))
    return _candidate("where the variables are", units, partitions)
