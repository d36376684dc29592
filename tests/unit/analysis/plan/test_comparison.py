"""What a plan missed is named: runs are made from simulations, and the plan is one of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.plan.comparison import REST, BesidePlan, Term, beside_answer, beside_plan
from weft.cli.main import main
from weft.errors import FormatError, UsageError
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


def run(**more: Any) -> Analysis:
    made = {"partitions": 2, "microbatches": 4, "replicas": 2, "forward_s": MS, "backward_s": 2 * MS, **more}
    return Analysis(Recorded(optimizer_s=5 * MS, reduce_s=2 * MS, **made).run())


def division(
    data: int, pipeline: int, microbatches: int, step_s: float = 0.02, **more: Any
) -> dict[str, Any]:
    return {
        "division": {"data": data, "pipeline": pipeline}, "step_s": step_s, "memory_bytes": 1 << 30,
        "settings": {"partitions": pipeline, "microbatches": microbatches}, **more,
    }  # fmt: skip


TERMS = {"work": 0.012, "bubble": 0.003, "crossings": 0.0, "replicas, exposed": 0.001, "optimizer": 0.004}


def test_the_division_that_ran_is_compared_term_by_term():
    cannot = {**division(2, 2, 4, 1.0), "settings": {}}
    plan = {
        "best": [cannot, division(4, 1, 4), division(2, 2, 8)], "runs_today": None,
        "of_kind": {"mixed": division(2, 2, 4, step=TERMS)},
    }  # fmt: skip
    found = beside_answer(run(), json.dumps(plan), "plan.json")
    terms = {term.name: (term.planned, term.measured) for term in found.terms}
    assert terms["work"] == pytest.approx((0.012, 0.012))
    assert terms["bubble"] == pytest.approx((0.003, 0.003))
    assert terms["replicas, exposed"] == pytest.approx((0.001, 0.002))
    assert terms["optimizer"] == pytest.approx((0.004, 0.005))
    assert terms[REST] == pytest.approx((0.0, 0.0), abs=1e-12)
    assert found.step.measured == pytest.approx(0.022)
    assert found.memory[0].measured == 100 << 20
    assert found.text.startswith("By the plan plan.json a step takes 20 ms; it took 22 ms (+10%)")


def test_a_division_that_runs_another_way_is_another_one():
    other = division(2, 2, 4)
    other["settings"] |= {"pipeline": "zb_h1"}
    shared = division(2, 2, 4)
    shared["settings"] |= {"shard_optimizer_state": True}
    plan = json.dumps([other, shared, division(2, 2, 4, 0.5)])
    assert beside_answer(run(), plan, "plan.json").step.planned == 0.5
    by_chance = run(settings={"pipeline": "auto"})
    assert beside_answer(by_chance, plan, "plan.json").step.planned == 0.02


def test_a_plan_of_a_traced_model_has_no_terms():
    found = beside_answer(run(), json.dumps([division(2, 2, 4)]), "plan.json")
    assert found.terms == () and found.missed is None


def test_a_plan_of_something_else_is_refused():
    with pytest.raises(UsageError, match=r'like what ran, 4 ranks with "partitions": 2, "microbatches": 4'):
        beside_answer(run(), json.dumps([division(4, 2, 4)]), "plan.json")
    for text in ("[", "{}", "[3]", '{"best": 3}', '[{"division": {}}]'):
        with pytest.raises(FormatError):
            beside_answer(run(), text, "plan.json")
    with pytest.raises(UsageError, match="record more steps"):
        beside_answer(run(steps=1), "[]", "plan.json")


def test_what_weft_plan_prints_can_be_read(capsys):
    words = "--layers 8 --hidden 512 --heads 8 --vocab 1000 --seq 128 --global-batch 8 --json".split()
    assert main(["plan", "--cluster", "1x4xT4", *words]) == 0
    text = capsys.readouterr().out
    settings = json.loads(text)["runs_today"]["settings"]
    analysis = Analysis(
        Recorded(
            partitions=settings["partitions"], replicas=4 // settings["partitions"],
            microbatches=settings["microbatches"], settings={**settings, "pipeline": "auto"},
        ).run()
    )  # fmt: skip
    found = beside_answer(analysis, text, "plan.json")
    assert sum(term.planned for term in found.terms) == pytest.approx(found.step.planned)
