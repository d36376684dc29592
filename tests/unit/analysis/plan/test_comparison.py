"""What a plan missed is named: runs are made from simulations, and the plan is one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.plan.comparison import BesidePlan, Term, beside_plan
from weft.plan.measured.planned import Part, Planned
from weft.schedule import make
from weft.simulate import Links, StageCost, simulate
from weft.topology.cluster import Link

MS = 1e-3
USUAL: dict[str, Any] = {"partitions": 2, "microbatches": 4, "forward_s": MS, "backward_s": 2 * MS}


def planned(transfer_s: float = 0.0) -> Planned:
    """The step of `USUAL` by 1F1B."""
    made = make("1f1b", 2, 4)
    links = Links.uniform(Link(latency_s=transfer_s))
    return Planned.of(simulate(made.ranks, made.rank_of_stage, [StageCost(MS, 2 * MS)] * 2, links))


def beside(**more: Any) -> BesidePlan:
    found = beside_plan(Analysis(Recorded(**{"planned": planned(), **USUAL, **more}).run()))
    assert found is not None
    return found


def test_a_plan_that_comes_true():
    found = beside(replicas=2, optimizer_s=5 * MS, host_s=3 * MS, data_s=2 * MS)
    assert found.step.measured == pytest.approx(found.step.planned)
    for term in found.terms:
        assert term.measured == pytest.approx(term.planned), term.where
    assert found.missed is None and "as planned" in found.text


def test_a_simulation_is_summed_up_by_partition():
    found = planned()
    assert found.step_s == pytest.approx(15 * MS)  # (m + p - 1) * 3 ms
    assert [(part.forward_s, part.backward_s) for part in found.parts] == [
        pytest.approx((4 * MS, 8 * MS))
    ] * 2


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"slow": {1: 2.0}}, "backward pass of partition 1"),
        ({"forward_s": (3 * MS, MS)}, "forward pass of partition 0"),
        ({"transfer_s": 5 * MS}, "waiting of partition "),
        ({"backward_s": 0.5 * MS}, "backward pass of partition "),
        ({"late": {(step, 0): 2.0 for step in range(9)}}, "backward pass of partition 0"),
    ],
)
def test_what_the_plan_missed_is_named(more: dict[str, Any], where: str):
    found = beside(**more)
    assert abs(found.share) > 0.1
    assert found.missed is not None and found.missed.where.startswith(where)
    assert found.missed.where in found.text


def test_partitions_of_copies_count_once():
    assert len(beside(replicas=3).terms) == 3 * 2


def test_memory_is_what_came_after_the_rank_had_joined():
    parts = tuple(replace(part, memory_bytes=1 << 30) for part in planned().parts)
    made = Recorded(
        planned=Planned(planned().step_s, parts),
        step_values=lambda rank, step: {"memory_bytes": (3 << 30) + step}, **USUAL,
    ).run()  # fmt: skip
    made = replace(
        made, facts={rank: replace(facts, base_bytes=2 << 30) for rank, facts in made.facts.items()}
    )
    found = beside_plan(Analysis(made))
    assert found is not None and [term.measured for term in found.memory] == [(1 << 30) + 8] * 2
    assert "emory" not in found.text
    far = replace(found, memory=(Term("memory", 1 << 30, 2 << 30, 1),))
    assert "Memory of partition 1 is 2 GiB, planned 1 GiB." in far.text


def test_nothing_is_said_without_a_plan_or_steps():
    assert beside_plan(Analysis(Recorded(**USUAL).run())) is None
    assert beside_plan(Analysis(Recorded(**{**USUAL, "steps": 1}, planned=planned()).run())) is None
    nothing = Planned(0.0, (Part(0.0, 0.0),) * 2)
    assert beside_plan(Analysis(Recorded(**USUAL, planned=nothing).run())) is None
    three = Planned(1.0, (Part(1.0, 1.0),) * 3)
    assert beside_plan(Analysis(Recorded(**USUAL, planned=three).run())) is None
