"""Units move between steps where ranks have become slower or faster than those that the split was made for.

Every rank notes how long each step keeps it busy. After ``STEPS`` of them all ranks compare, before the next step
begins. The first rank decides, from the numbers of all, and the others follow.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.errors import UsageError
from weft.graph.model import Graph
from weft.plan.chosen import execution, schedule_for
from weft.plan.measured.planned import Planned
from weft.plan.measured.rebalanced import NOISE, Better, Present, find_split
from weft.runtime.allocator import give_back
from weft.session.recording import record_plan, record_preparation
from weft.timeline import WORK
from weft.torch.execution.unit_call import FLOATING
from weft.torch.placed.move import move, moved, why_not
from weft.torch.placed.plan import Plan
from weft.torch.session.collectives import agree_on, gather_texts
from weft.torch.session.device import limit_bytes
from weft.torch.session.session import Session
from weft.torch.split.report import describe_units

log = logging.getLogger("weft")

STEPS = 10
"""Ranks compare after so many steps, and so units do not move more often."""


def busy_s(session: Session) -> float:
    """Seconds that this rank worked on a microbatch of the last step."""
    assert session.executor is not None
    spans = [span for span in session.executor.spans if span.kind in WORK]
    return sum(span.end_s - span.start_s for span in spans) / len({span.microbatch for span in spans} or {0})


class Rebalance:
    """The steps of one model since its split."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = tuple(speeds)
        self._name = ""
        self._busy_s: list[float] = []
        self._new = True
        """The split is: its first step learns what units return."""

    def add(self, session: Session, name: str) -> None:
        """Note a step that has trained. ``name``: that of its function; steps of the first one that trains count."""
        self._name = self._name or name
        if name == self._name:
            if not self._new:
                self._busy_s.append(busy_s(session))
            self._new = False

    def look(self, session: Session) -> None:
        """Before a step: where there are enough, compare, and let units move if that helps; collective over all ranks.

        Raises:
            UsageError: Something has come up that cannot move.
        """
        if len(self._busy_s) < STEPS or not session.settings.rebalance:  # a later init may end it
            return
        own, self._busy_s = json.dumps([self._busy_s, why_not(session)]), []
        with record_preparation(session), session.doing("the comparison of the ranks' times"):
            found = [json.loads(text) for text in gather_texts(own, session.group("world"))]
            refuse(next((fault for _, fault in found if fault), ""))
            (model,) = session.models
            decide = functools.partial(self._decide, session, model, [times for times, _ in found])
            answer = json.loads(agree_on(session, decide, "the next split"))
        if answer is None:
            return
        self._speeds, self._new = tuple(answer["speeds"]), True
        plan = moved(model.plan, answer["stages"], answer["layout"], answer["planned"])
        with record_preparation(session):
            move(session, model, plan)
            give_back()
        session.recorded.units[:] = describe_units(plan)
        record_plan(session, Planned.from_record(answer["planned"]))

    def _decide(self, session: Session, model: Any, times: Sequence[Sequence[float]]) -> str:
        """The next split as JSON; on the rank that decides. ``times``: of each rank, by step."""
        settings, plan = session.settings, model.plan
        by_partition: list[list[Sequence[float]]] = [[] for _ in range(settings.partitions)]
        for rank, own in enumerate(times):
            by_partition[session.mesh.position("pp", rank)].append(own)
        slowest = [[max(each) for each in zip(*own, strict=True)] for own in by_partition]
        units = [unit for unit in plan.units if unit.partition != FLOATING]
        present = Present(
            Graph(tuple(replace(unit.unit, group=unit.tied or None) for unit in units)),
            tuple(unit.partition if unit.stage is None else unit.stage for unit in units),
            schedule_for(settings, None, settings.microbatch_count),
            self._speeds,
            plan.memory_weight,
            limit_bytes(session),
            execution(settings, plan.revisits),
        )
        better = find_split(present, [*zip(*slowest, strict=True)])
        if better is None:
            return "null"
        layout = present.schedule.rank_of_stage
        names = {unit.name: stage for unit, stage in zip(units, better.stages, strict=True)}
        log.info("%s", _summary(plan, names, layout, better))
        return json.dumps(
            {
                "stages": names, "layout": layout, "speeds": better.speeds,
                "planned": Planned.of(better.step).to_record(),
            }
        )  # fmt: skip


def refuse(fault: str) -> None:
    """Refuse to move units, if there is a reason.

    Raises:
        UsageError: There is.
    """
    if fault:
        raise UsageError(f'rebalance cannot move modules to other ranks: {fault}. Write "rebalance": false')


def _summary(plan: Plan, stages: Mapping[str, int], layout: Sequence[int], better: Better) -> str:
    """The move, why, and the gain that is expected, on one line."""
    late = [
        f"partition {at} took {factor:.2f} times as long"
        for at, factor in enumerate(better.late)
        if factor > 1 + NOISE
    ]
    moves: dict[tuple[int, int], list[str]] = {}
    for unit in plan.units:
        if unit.partition != FLOATING and layout[stages[unit.name]] != unit.partition:
            moves.setdefault((unit.partition, layout[stages[unit.name]]), []).append(unit.name)
    went = [
        f"{', '.join(names)} from partition {before} to {after}" for (before, after), names in moves.items()
    ]
    gain = 100 * (1 - better.step.step_s / better.present_s)
    return (
        f"rebalance: in the last {STEPS} steps {' and '.join(late)} as the split was made for, beside the others: "
        f"{'; '.join(went)}. A step is expected to take {better.step.step_s * 1e3:.1f} ms instead of "
        f"{better.present_s * 1e3:.1f} ms (-{gain:.0f} %)"
    )
