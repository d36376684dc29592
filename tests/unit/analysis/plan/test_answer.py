"""A run beside what `weft plan --json` printed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.plan.answer import REST, beside_answer
from weft.cli.main import main
from weft.errors import FormatError, UsageError

MS = 1e-3


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
