"""Which schedule a job runs: the one that its settings name, or the best of all (`auto`)."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from weft import schedule
from weft.config import Settings
from weft.errors import UsageError
from weft.plan.auto import Found, Option
from weft.schedule import Schedule
from weft.simulate import Links, StageCost
from weft.topology.cluster import Link

LOOPED = ("looped", "looped_bfs")
MEASURED = ("auto", "list", "file")
"""Schedules that the deciding rank makes, and tells the others."""
AHEAD = 1
"""How many more than its list holds a rank may start while it would wait, where speed counts more than memory."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A schedule that the deciding rank has made: what runs, what it was predicted to take, and why.

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
        """What :meth:`from_record` reads."""
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
    return schedule_for(settings, chosen, settings.microbatches).rank_of_stage


def schedule_for(settings: Settings, chosen: Chosen | None, microbatches: int) -> Schedule:
    """The schedule of a step of so many microbatches."""
    if chosen is None:
        chunks = settings.chunks if settings.pipeline in LOOPED else None
        active = settings.active_microbatches if settings.pipeline in ("interleaved", "zb_h1") else None
        name = "interleaved" if settings.pipeline in MEASURED else settings.pipeline  # placed by hand
        return _made(name, settings.partitions, microbatches, active, chunks)
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
    return _made(
        option.like or option.schedule, settings.partitions, microbatches, option.active, option.chunks
    )


def ahead(settings: Settings) -> int | None:
    """How many more (stage, microbatch) than its list a rank may hold; None: never more at any point of the list."""
    if settings.memory_limit:
        return None
    return AHEAD if settings.optimize == "speed" and settings.pipeline in ("interleaved", "auto") else 0


@functools.lru_cache(16)
def _made(name: str, ranks: int, microbatches: int, active: int | None, chunks: int | None) -> Schedule:
    return schedule.make(name, ranks, microbatches, active=active, chunks=chunks)
