"""A machine whose true figures are known runs a job; from what it did they are found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.plan.calibrate import Observed, calibrate, observe, predicted, terms
from weft.errors import UsageError
from weft.graph.sizes import Sizes
from weft.machines.catalogue import host_of
from weft.machines.host import Conduct, Host
from weft.plan.parallelism.job import Division, Job
from weft.topology.cluster import Link

MS = 1e-3
SIZES = Sizes(layers=12, hidden=768, heads=12, ffn=3072, vocab=32000, seq=512)
GIVEN = replace(host_of("A100-80", 8), conduct=Conduct(data=0.5, crossing_s=1e-4))
DEVICE = GIVEN.accelerator
TRUE = replace(
    GIVEN,
    accelerator=replace(
        DEVICE, memory_bytes=40 << 30, share={**DEVICE.share, "bf16": 0.35}, memory_share=0.31,
        attention_share=DEVICE.attention_share * 0.35 / DEVICE.share["bf16"],
    ),
    inside=Link(GIVEN.inside.latency_s, GIVEN.inside.bytes_per_s / 3),
    network=Link(GIVEN.network.latency_s, GIVEN.network.bytes_per_s / 4),
)  # fmt: skip
DIVISIONS = [
    Division(pipeline=4, microbatch=2),
    Division(data=4, microbatch=2),
    Division(data=2, pipeline=2, microbatch=2),
    Division(data=4, pipeline=2, sharded="optimizer"),
    Division(data=4, microbatch=1, sharded="parameters"),
    Division(pipeline=2, chunks=2, schedule="interleaved_1f1b"),
]


def job(batch: int = 64) -> Job:
    return Job(SIZES, batch)


def seen(host: Host, division: Division, hosts: int = 1) -> Observed:
    """What a run on such hosts would have told."""
    blank = Observed(division, hosts, {})
    parts = terms(predicted(job(), host, blank))
    return Observed(division, hosts, parts, message_s=1.0, limit_bytes=host.accelerator.memory_bytes)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_the_plan_of_the_run_comes_true(division: Division, hosts: int):
    observed = seen(TRUE, division, hosts)
    assert terms(predicted(job(), GIVEN, observed)) != pytest.approx(observed.parts, rel=0.1)
    found = calibrate(GIVEN, [(job(), observed)])
    assert terms(predicted(job(), found, observed)) == pytest.approx(observed.parts, rel=1e-3, abs=1e-9)
    assert found.accelerator.memory_bytes == 40 << 30
    assert found.accelerator.share["bf16"] == pytest.approx(0.35, rel=0.01)
    assert found.accelerator.memory_share == pytest.approx(0.31, rel=0.01)
    assert found.accelerator.share["fp16"] == GIVEN.accelerator.share["fp16"], "nothing was seen of that"


@pytest.mark.parametrize("division", [each for each in DIVISIONS if each.sharded != "none"], ids=str)
def test_what_ranks_share_has_a_rate_of_its_own(division: Division):
    given = replace(GIVEN, sharing=Link(2e-6, 5e9))
    observed = seen(replace(TRUE, sharing=Link(2e-6, 2e9)), division)
    found = calibrate(given, [(job(), observed)])
    assert terms(predicted(job(), found, observed)) == pytest.approx(observed.parts, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_a_second_time_changes_nothing(division: Division):
    observed = seen(TRUE, division)
    once = calibrate(GIVEN, [(job(), observed)])
    again = calibrate(once, [(job(), observed)])
    assert terms(predicted(job(), again, observed)) == pytest.approx(
        terms(predicted(job(), once, observed)), rel=1e-3, abs=1e-9
    )


def test_a_machine_quicker_than_its_peak_gets_another_peak():
    quick = replace(
        TRUE,
        accelerator=replace(TRUE.accelerator, peak={k: 4 * v for k, v in TRUE.accelerator.peak.items()}),
    )
    observed = seen(quick, DIVISIONS[0])
    found = calibrate(GIVEN, [(job(), observed)])
    assert terms(predicted(job(), found, observed)) == pytest.approx(observed.parts, rel=1e-3)


def test_runs_of_two_sizes_tell_how_the_share_follows_from_the_size():
    small, large, between = (Division(data=2, microbatch=size) for size in (1, 32, 4))
    true = replace(TRUE, accelerator=replace(TRUE.accelerator, half_flops=2e10))
    runs = [(job(), seen(true, division)) for division in (small, large)]
    found = calibrate(GIVEN, runs)
    assert found.accelerator.half_flops == pytest.approx(2e10, rel=0.02)
    wanted = predicted(job(), true, seen(true, between)).work
    assert predicted(job(), found, seen(true, between)).work == pytest.approx(wanted, rel=0.01)
    by_one = calibrate(GIVEN, runs[:1])
    assert abs(predicted(job(), by_one, seen(true, between)).work / wanted - 1) > 0.1


def test_an_optimizer_that_leaves_nothing_to_products_is_not_believed():
    observed = seen(TRUE, DIVISIONS[0])
    slow = replace(observed, parts={**observed.parts, "optimizer": 1000 * observed.parts["optimizer"]})
    found = calibrate(GIVEN, [(job(), slow)])
    assert found.accelerator.memory_share == GIVEN.accelerator.memory_share
    assert predicted(job(), found, slow).work == pytest.approx(observed.parts["work"], rel=1e-3)


def test_a_run_that_did_nothing_changes_nothing_of_the_device():
    runs = [Division(data=2, microbatch=size) for size in (1, 2)]
    idle = [
        (job(), replace(seen(TRUE, one), parts=dict.fromkeys(seen(TRUE, one).parts, 0.0))) for one in runs
    ]
    for some in (idle[:1], idle):
        found = calibrate(GIVEN, some).accelerator
        assert replace(found, memory_bytes=DEVICE.memory_bytes) == DEVICE


def test_a_recording_is_seen_by_its_busiest_rank():
    made = Recorded(
        partitions=2, microbatches=4, replicas=2, forward_s=MS, backward_s=2 * MS, optimizer_s=5 * MS, reduce_s=3 * MS,
        transfer_s=MS / 2, data_s=9 * MS, host_s=7 * MS, slow={1: 1.5}, settings={"shard_optimizer_state": True},
    )  # fmt: skip
    analysis = Analysis(made.run())
    found = observe(analysis, 32)
    assert found.division == Division(data=2, pipeline=2, microbatch=4, sharded="optimizer")
    assert found.hosts == 1 and found.limit_bytes == 1 << 30
    assert found.parts["work"] == pytest.approx(18 * MS)
    assert found.parts["optimizer"] == pytest.approx(5 * MS)
    assert found.parts["replicas, exposed"] == pytest.approx(3 * MS)
    assert found.message_s == pytest.approx(MS / 2)
    assert found.step_s < analysis.step_s - 15 * MS, "waiting for data and the script are no part of a plan"


def test_settings_that_make_no_sense_count_as_left_out():
    made = Recorded(
        partitions=2, microbatches=4, settings={"partitions": 0, "microbatches": -1, "chunks": "x"}
    )
    assert observe(Analysis(made.run()), 32).division == Division(data=2, microbatch=16)


def test_what_no_plan_is_for_is_refused():
    made = Recorded(partitions=2, microbatches=4)
    with pytest.raises(UsageError, match="no usual step"):
        observe(Analysis(replace(made, steps=1).run()), 32)
    with pytest.raises(
        UsageError, match=r"4 microbatches cannot share 30 sequences equally: give --global-batch"
    ):
        observe(Analysis(made.run()), 30)
