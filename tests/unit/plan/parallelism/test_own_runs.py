"""The parts of the comparison of plans with weft's own runs (`benchmarks/plan`) that need no run."""

from __future__ import annotations

import pytest

from benchmarks.plan import choice, memory
from benchmarks.plan.runs import BATCH, NAMES, Task, gpt_sizes, task_of
from weft.graph import Graph, Unit
from weft.machines.catalogue import host_of
from weft.machines.host import Machines
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.search import search
from weft.plan.parallelism.supported_layouts import cannot

MIB = 2**20


def test_divisions_fill_their_ranks_and_divide_the_batch():
    for ranks in (2, 4):
        found = list(memory.divisions(ranks))
        assert all(one.ranks == ranks and not cannot(None, one) for one in found)
        assert all(BATCH % (one.data * memory.SAMPLES) == 0 for one in found)
        assert {(one.sharded, one.recompute) for one in found} >= {("none", "full"), ("optimizer", "none")}
        assert len(set(found)) == len(found) == 6


def test_a_task_is_what_a_division_says():
    task = task_of("t5", Division(data=2, pipeline=2, recompute="full"), 4, True, 3)
    assert task == Task("t5", True, 4, 2, True, 3) == Task.from_text(task.to_text())


def test_the_gpt_by_its_sizes_has_its_parameters():
    torch = pytest.importorskip("torch")
    from benchmarks.plan.trainee import network_of

    with torch.device("meta"):
        every = sum(one.numel() for one in network_of(Task("gpt")).parameters())
    assert gpt_sizes(False).parameters == pytest.approx(every, rel=2e-3)
    assert "gpt" in NAMES


def test_memory_of_a_row_leaves_out_what_is_reserved():
    graph = Graph(Unit(f"u{at}", 1.0, 2.0, MIB, 3 * MIB) for at in range(4))
    found = memory.predicted("t5", graph, Division(pipeline=2, microbatch=2), False, False)
    line, error = memory.row("t5", Division(pipeline=2), found, 16 * MIB, 3 * MIB)
    assert line.endswith("| 2 | 2 | 4 | 12 | 0 | 20 | 16 | +25% | 3 |") and error == 0.25
    whole = memory.predicted("gpt", None, Division(data=2, microbatch=2), False, False)
    assert whole.lasting == 16 * gpt_sizes(False).parameters
    assert memory.verdict([0.05, -0.25]) == "2 runs: 15% in the mean, 25% at most, bias -10%; 1 within 10%"


def test_plans_that_are_run_are_weft_s_and_unlike():
    found = search(Job(gpt_sizes(False), BATCH, "fp32"), Machines(host_of("cpu:1", 4), 1))
    plans = choice.candidates(found, 6)
    assert 1 < len(plans) <= 6 and len({str(plan.division) for plan in plans}) == len(plans)
    assert all(not cannot(None, plan.division) for plan in plans)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert plans[0] == found.runs_today


def test_what_is_chosen_is_held_against_the_best_that_ran():
    assert choice.chosen([(1.0, 1.0), (2.0, 0.8)]) == pytest.approx((0.25, 0.0))
