"""The schedule of a job: the one that its settings name, or the best of all (`auto`)."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, TypedDict

from weft import schedule
from weft.config import Settings
from weft.errors import UsageError
from weft.plan.option import Option, options
from weft.plan.search import Found
from weft.schedule import Schedule
from weft.schedule.order import Order
from weft.schedule.table import KINDS
from weft.simulate import Links, StageCost
from weft.simulate.memory import COPIES
from weft.topology.cluster import Link

AHEAD = 1
"""How many more than its list holds a rank may start while it would wait, where speed counts more than memory."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A schedule that rank 0 has made: what runs, what it was predicted to take, and why.

    ``stages``: the costs that the prediction stands on; ``links``: what crossings take.
    """

    option: Option
    schedule: Schedule
    stages: tuple[StageCost, ...]
    links: Links
    step_s: float
    reasons: str

    @classmethod
    def of(cls, found: Found, links: Links, reasons: str) -> Chosen:
        assert found.schedule is not None and found.placed is not None
        return cls(found.option, found.schedule, found.placed.stages, links, found.step_s, reasons)

    def to_record(self) -> dict[str, Any]:
        """The value that :meth:`from_record` reads."""
        link = self.links.between(0, 1)
        return {
            "option": dataclasses.asdict(self.option),
            "actions": schedule.to_csv(self.schedule),
            "rank_of_stage": list(self.schedule.rank_of_stage),
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "link": [link.latency_s, link.bytes_per_s, self.links.overhead_s],
            "step_s": self.step_s,
            "reasons": self.reasons,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Chosen:
        option = Option(**record["option"])
        read = schedule.from_csv(record["actions"])
        *link, overhead_s = record["link"]
        return cls(
            option,
            Schedule(option.schedule, read.ranks, tuple(record["rank_of_stage"])),
            tuple(StageCost(**stage) for stage in record["stages"]),
            Links.uniform(Link(*link), overhead_s=overhead_s),
            record["step_s"],
            record["reasons"],
        )

    def to_json(self) -> str:
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, text: str) -> Chosen:
        return cls.from_record(json.loads(text))


def layout(settings: Settings, chosen: Chosen | None) -> Sequence[int]:
    """The partition of each stage."""
    return schedule_for(settings, chosen, settings.microbatch_count).rank_of_stage


def schedule_for(settings: Settings, chosen: Chosen | None, microbatches: int) -> Schedule:
    """The schedule of a step of so many microbatches."""
    if chosen is None:
        kind = KINDS[settings.pipeline]
        chunks = settings.chunks if kind.free_chunks else None
        active = settings.active_microbatches if kind.limited else None
        name = "1f1b" if kind.measured else settings.pipeline  # nothing is measured for a split by hand
        return _make(name, settings.partitions, microbatches, active, chunks)
    if chosen.schedule.microbatches == microbatches:
        return chosen.schedule
    option = chosen.option
    if option.schedule == "file":
        raise UsageError(
            f"the schedule of the file is for {chosen.schedule.microbatches} microbatches, but the step has "
            f"{microbatches}: call init with {chosen.schedule.microbatches}, or use another schedule"
        )
    if option.like == "v":
        return option.actions(
            settings.partitions,
            microbatches,
            chosen.stages,
            chosen.links,
            None,
            chosen.schedule.rank_of_stage,
        )
    return _make(
        option.like or option.schedule, settings.partitions, microbatches, option.active, option.chunks
    )


def options_for(settings: Settings, limited: bool) -> list[Option]:
    """The options that may help; where memory is not ``limited``, those that only save memory are left out."""
    tried = options(settings.partitions, settings.microbatch_count)
    if settings.pipeline == "list":
        tried = [option for option in tried if option.schedule == "list"]
    return tried if limited else [o for o in tried if not o.recompute and o.active is None]


def ahead(settings: Settings) -> int | None:
    """The number of (stage, microbatch) that a rank may hold beyond its list; None: never more at any point of the
    list."""
    if settings.memory_limit:
        return None
    return AHEAD if settings.optimize == "speed" and KINDS[settings.pipeline].early else 0


class Execution(TypedDict):
    """The manner in which ranks run a step, as a simulation takes it: see `weft.simulate.as_weft_runs`."""

    ahead: int | None
    copies: int
    offloads: bool
    held: int


def execution(settings: Settings, revisits: bool) -> Execution:
    """The manner in which ranks run a step; offloaded optimizer states leave two copies of a parameter on the device,
    offloaded weights one less.

    ``revisits``: microbatches come back to ranks that they have left. What lists hold is no limit then.
    """
    held = settings.microbatch_count
    if KINDS[settings.pipeline].limited:
        held = min(held, settings.active_microbatches)
    if settings.deterministic:  # each waits for the one before
        held = 1
    return Execution(
        ahead=ahead(settings),
        copies=COPIES - 2 * settings.offload_optimizer - settings.offload_weights,
        offloads=bool(settings.offload_activations),
        held=held if revisits else 0,
    )


def order_for(
    settings: Settings, chosen: Chosen | None, microbatches: int, partition: int, revisited: bool = False
) -> Order:
    """The order that the executor of a partition follows in a step of so many microbatches.

    ``revisited``: microbatches come back to partitions that they have left.
    """
    actions = schedule_for(settings, chosen, microbatches).ranks[partition]
    limit = settings.active_microbatches if KINDS[settings.pipeline].limited else len(actions)
    return Order.of(actions, limit, revisited, ahead(settings))


def most_in_flight(settings: Settings) -> int:
    """The most microbatches that a rank may hold at once."""
    more = ahead(settings)
    if not KINDS[settings.pipeline].limited or more is None:
        return settings.microbatch_count
    return min(settings.microbatch_count, settings.active_microbatches + more)


@functools.lru_cache(16)
def _make(name: str, ranks: int, microbatches: int, active: int | None, chunks: int | None) -> Schedule:
    return schedule.make(name, ranks, microbatches, active=active, chunks=chunks)
