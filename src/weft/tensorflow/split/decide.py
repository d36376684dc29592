"""Which unit goes to which partition, and which schedule runs: decided on one rank, told to all as text."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft import schedule
from weft.config import Settings
from weft.errors import DivergenceError, PlacementError
from weft.foreign import read_text
from weft.partition import Placement, Problem
from weft.plan.chosen import options_for, schedule_for
from weft.plan.explain import explain
from weft.plan.option import Option, Placed
from weft.plan.search import as_weft_runs
from weft.plan.stages import Placer, choices, stages_of
from weft.schedule import Schedule
from weft.schedule.legal import check
from weft.schedule.table import KINDS
from weft.session.collectives import agree_on, gather_texts
from weft.simulate import Links
from weft.tensorflow.session.session import Session
from weft.tensorflow.split.units import Units
from weft.tensorflow.trace.operations import Record
from weft.topology.cluster import Link

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
        """What :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """What rank 0 has decided."""
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
    """The decision of rank 0, on every rank.

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
        session,
        session.port(),
        lambda: decide(settings, units, fixed, microbatches).to_json(),
        "the partition",
    )
    return Decision.from_json(text)


def compare_graphs(session: Session, record: Record) -> None:
    """All ranks must have traced the same operations.

    Raises:
        DivergenceError: They have not; on every rank.
    """
    if session.place.world_size == 1:
        return
    lines = [f"{each.kind} {each.name} {each.inputs}" for each in record.operations]
    mine = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    port = session.port()
    with session.doing("the comparison of graphs"):
        found = gather_texts(mine, port)
        if len(set(found)) == 1:
            return
        told = [text.split("\n") for text in gather_texts("\n".join(lines), port)]
    other = next(rank for rank, text in enumerate(found) if text != found[0])
    first, second = told[0], told[other]
    at = next((i for i, (one, two) in enumerate(zip(first, second, strict=False)) if one != two), None)
    at = min(len(first), len(second)) if at is None else at
    one, two = (
        lines[at].rsplit(" (", 1)[0] if at < len(lines) else "nothing more" for lines in (first, second)
    )
    raise DivergenceError(
        f"the ranks have traced different steps: operation {at} is {one} on rank 0, and {two} on rank {other}. Build "
        "the same model and call the step with arguments of the same shapes on every rank"
    )


def decide(settings: Settings, units: Units, fixed: Mapping[str, int], microbatches: int) -> Decision:
    """Where the units go, and what runs; on the rank that decides.

    ``fixed``: units whose partition is known, by name.
    """
    links = Links.uniform(LINK)
    if not settings.auto_partition:
        return _by_hand(settings, units, fixed, microbatches, links)
    if fixed:
        return _beside(settings, units, fixed, microbatches, links)
    placer = Placer(
        units.graph, settings.partitions, microbatches, links, memory_weight=settings.memory_weight,
        memory_bytes=[int(settings.memory_limit)] * settings.partitions if settings.memory_limit else None,
    )  # fmt: skip
    if KINDS[settings.pipeline].measured and settings.pipeline != "file":
        tried = [each for each in options_for(settings, bool(settings.memory_limit)) if not _splits(each)]
        found = choices(placer, tried)
        best = next((one for one in found if one.schedule is not None and not one.fault), None)
        if best is None or best.placed is None or best.schedule is None:
            raise PlacementError(f"no schedule can run: {found[0].fault}")
        return _decision(best.placed, best.schedule, best.step_s, explain(found))
    return _as_asked(settings, placer, microbatches, links)


def _splits(option: Option) -> bool:
    return option.splits or option.recompute or KINDS[option.schedule].splits


def _as_asked(settings: Settings, placer: Placer, microbatches: int, links: Links) -> Decision:
    """The schedule that the settings name."""
    if settings.pipeline == "file":
        made = schedule.make(
            "file", settings.partitions, microbatches, text=read_text(settings.schedule_file)
        )
        check(made)
    else:
        made = schedule_for(settings, None, microbatches)
    return _scheduled(settings, placer(made.rank_of_stage), made, microbatches, links)


def _scheduled(
    settings: Settings, placed: Placed, made: Schedule, microbatches: int, links: Links
) -> Decision:
    """Units on stages, with the schedule that was asked for if it has such stages, else by a list of its own."""
    if placed.rank_of_stage and placed.rank_of_stage != made.rank_of_stage:
        option = Option("list", like=made.name if made.name in KINDS else "interleaved")
        made = option.actions(
            settings.partitions, microbatches, placed.stages, links, None, placed.rank_of_stage
        )
    step = as_weft_runs(made, placed.stages, links, placed.edges)
    return _decision(placed, made, step.step_s, "")


def _decision(placed: Placed, made: Schedule, step_s: float, reasons: str) -> Decision:
    placement: Placement = placed.placement
    stages = placed.rank_of_stage or tuple(placement.problem.owners)
    at = stage_of_units(placement.partitions, placement.segments, stages)
    return Decision(
        tuple(placement.partitions), at, tuple(stages), schedule.to_csv(made), made.name, step_s, reasons
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


def _by_hand(
    settings: Settings, units: Units, fixed: Mapping[str, int], microbatches: int, links: Links
) -> Decision:
    """Units where the script wants them, all others on the default partition."""
    partitions = [
        fixed.get(unit.name, units.by_hand.get(number, settings.default_partition))
        for number, unit in enumerate(units.graph.units)
    ]
    groups: dict[str, int] = {}
    for number, unit in enumerate(units.graph.units):
        if unit.group is not None:
            partitions[number] = groups.setdefault(unit.group, partitions[number])
    return _on_partitions(settings, units, tuple(partitions), microbatches, links)


def _beside(
    settings: Settings, units: Units, fixed: Mapping[str, int], microbatches: int, links: Links
) -> Decision:
    """Units whose variables lie somewhere already stay there; each other one goes where the unit before it went."""
    partitions: list[int] = []
    for unit in units.graph.units:
        partitions.append(fixed.get(unit.name, partitions[-1] if partitions else min(fixed.values())))
    return _on_partitions(settings, units, tuple(partitions), microbatches, links)


def _on_partitions(
    settings: Settings, units: Units, partitions: tuple[int, ...], microbatches: int, links: Links
) -> Decision:
    """Units on given partitions, with the schedule that was asked for where their stages allow it."""
    kind = KINDS[settings.pipeline]
    name = settings.pipeline if kind.chunks == (1, 1) else "interleaved"
    made = schedule.make(
        name, settings.partitions, microbatches,
        active=settings.active_microbatches if kind.limited and name == settings.pipeline else None,
    )  # fmt: skip
    problem = Problem(units.graph, settings.partitions)
    placement = Placement(problem, partitions)
    placed = stages_of(units.graph, partitions, problem.owners, placement=placement)
    return _scheduled(settings, placed, made, microbatches, links)
