"""The search against trying everything by hand, and as properties; the guide; what weft runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.graph.sizes import Sizes
from weft.machines.cluster import parse_cluster
from weft.machines.host import Machines
from weft.plan.parallelism.guide import fewest_microbatches, guide, learning_rate
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.memory import activation_bytes, memory_of, usable_bytes
from weft.plan.parallelism.search import Found, divisions, search
from weft.plan.parallelism.step import StepTimes, step_of
from weft.plan.parallelism.supported_layouts import cannot, command
from weft.plan.parallelism.supported_layouts import settings as settings_of
from weft.topology.cluster import Link

SIZES = Sizes(24, 2048, 16, 8192, 51200, 2048)
JOB = Job(SIZES, 64)
MACHINES = parse_cluster("2x8xA100-40")


def test_the_best_is_the_fastest_of_all_that_fit():
    limit = usable_bytes(MACHINES.host.accelerator.memory_bytes)
    every = list(divisions(JOB, MACHINES, Found()))
    times = StepTimes(JOB, MACHINES)
    fit = [one for one in every if memory_of(JOB, one, times.shares(one), True).total <= limit]
    found = search(JOB, MACHINES)
    assert (found.tried, found.fits) == (len(every), len(fit))
    assert found.best[0].seconds == pytest.approx(
        min(step_of(JOB, one, MACHINES).seconds for one in fit), rel=1e-5
    )
    assert len(set(every)) == len(every) and all(one.ranks == 16 for one in every)
    today = min(step_of(JOB, one, MACHINES).seconds for one in fit if not cannot(JOB, one))
    assert found.runs_today is not None and found.runs_today.seconds == pytest.approx(today, rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.floats(4e9, 40e9), st.floats(1.0, 4.0))
def test_more_memory_never_makes_the_best_plan_slower(memory, factor):
    less = search(JOB, MACHINES, memory_bytes=int(memory)).best
    more = search(JOB, MACHINES, memory_bytes=int(memory * factor)).best
    assert not less or more[0].seconds <= less[0].seconds * (1 + 1e-5)


@settings(max_examples=15, deadline=None)
@given(st.floats(1.0, 20.0))
def test_a_faster_link_never_makes_the_best_plan_slower(factor):
    host = MACHINES.host
    faster = replace(host, network=Link(host.network.latency_s, host.network.bytes_per_s * factor))
    assert search(JOB, Machines(faster, 2)).best[0].seconds <= search(JOB, MACHINES).best[0].seconds * (
        1 + 1e-5
    )


def test_why_others_cannot_be():
    found = Found()
    list(divisions(Job(replace(SIZES, layers=2, heads=4, kv_heads=2), 6), MACHINES, found))
    assert "4 heads (2 of keys) do not divide by 8" in found.refused
    assert found.refused["more pipeline ranks than the 2 layers"] > 1
    assert "16 replicas do not divide the batch of 6" in found.refused


def test_tensor_parallelism_is_tried_as_weft_runs_it():
    """On one host whose ranks hold an eighth of the model each, only tensor or pipeline ranks fit; weft runs both."""
    every = list(divisions(Job(SIZES, 8), parse_cluster("1x8xA100-80"), Found()))
    split = [one for one in every if one.tensor > 1]
    assert all(one.along for one in split) and any(not cannot(JOB, one) for one in split)
    today = search(Job(replace(SIZES, layers=3), 1), parse_cluster("1x8xA100-80")).runs_today
    assert today is not None and today.division.tensor == 8, "three layers and one sample leave nothing else"


@pytest.mark.parametrize("slow", ["sums", "tokens"])
def test_sequences_are_split_where_that_was_measured_to_be_faster(slow: str):
    """And where only what is split fits."""
    links = dict.fromkeys(("sums", "tokens"), Link(1e-6, 1e11)) | {slow: Link(1e-3, 1e9)}
    usual = parse_cluster("1x8xA100-80")
    machines = replace(usual, host=replace(usual.host, **links))
    job = Job(replace(SIZES, layers=3), 1)
    best = search(job, machines).best[0].division
    assert (best.tensor, best.along) == (8, slow == "sums")
    assert settings_of(best, 1)["sequence_parallel"] is (slow == "sums")
    odd = Job(replace(SIZES, layers=3, seq=1023), 1)
    assert not any(one.along for one in divisions(odd, machines, Found()) if one.tensor > 1)
    if slow == "tokens":
        memory = [memory_of(job, replace(best, along=one, recompute="full")).total for one in (True, False)]
        small = search(job, machines, memory_bytes=sum(memory) / 2)
        assert small.best[0].division.along


def test_the_guide_begins_with_replicas_and_stops_where_they_fit():
    small = guide(JOB, parse_cluster("8xA100-80"))
    assert small[0].what == "8 replicas, 8 sequences each at once"
    alone = [line.fits for line in small if "replicas share" not in line.what and ":" not in line.what]
    assert alone == [False] * (len(alone) - 1) + [True]
    large = guide(
        Job(Sizes(80, 8192, 64, 28672, 128256, 8192, 8, gated=True), 512, "fp32"), parse_cluster("8x8xH100")
    )
    told = [line.what for line in large if not line.fits]
    assert told == [
        "64 replicas, 8 sequences each at once", "one sequence at a time", "recomputation of whole layers",
        "mixed precision in bf16", "gradients in 16 bits", "inputs of 4096 tokens",
    ]  # fmt: skip
    first = [line.memory_bytes for line in large[:3]]
    assert first == sorted(first, reverse=True)


def test_rates_grow_with_the_batch():
    """Goyal et al., arXiv 1706.02677: 0.1 for 256 images, 3.2 for 8192."""
    assert learning_rate(0.1, 256, 8192) == pytest.approx(3.2)
    assert learning_rate(1.0, 1, 4, "adam") == 2.0


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_microbatches_from_which_the_bubble_is_small(schedule):
    division = Division(pipeline=8, schedule=schedule, microbatch=1)
    few = fewest_microbatches(JOB, division, MACHINES)
    shares = []
    for count in (few - 1, few):
        step = step_of(replace(JOB, batch=count), division, MACHINES)
        shares.append(step.bubble / (step.bubble + step.work))
    assert shares[1] < 0.05 <= shares[0]
    assert fewest_microbatches(JOB, Division(data=8), MACHINES) == 1


@pytest.mark.parametrize(
    ("division", "why"),
    [
        (Division(tensor=2), ""),
        (Division(tensor=2, data=2, along=False, sharded="optimizer"), ""),
        (Division(tensor=2, pipeline=2, along=False), ""),
        (Division(context=2, pipeline=2, data=2), ""),
        (Division(context=2, tensor=2, along=False), ""),
        (
            Division(context=2, tensor=2),
            "tokens sharded between layers that are split, beside context parallelism, are not in weft",
        ),
        (
            Division(context=2, sharded="optimizer"),
            "sharing states or parameters among ranks that share sequences is not in weft",
        ),
        (Division(pipeline=2, schedule="zb_2p"), "the schedule zb_2p is not in weft"),
        (Division(pipeline=2, data=2, sharded="parameters"), ""),
        (Division(tensor=2, data=2, along=False, sharded="parameters"), ""),
        (Division(data=2), ""),
    ],
)
def test_what_weft_cannot_run(division, why):
    assert cannot(JOB, division) == why
    assert cannot(replace(JOB, precision="fp8"), division)


def test_commands():
    in_parts = command(Division(tensor=2, pipeline=4, along=False), 16, parse_cluster("8xT4"))
    assert "--set partitions=4 --set microbatches=16 --set tensor_parallel_degree=2" in in_parts
    longer = command(Division(context=2, pipeline=4), 16, parse_cluster("8xT4"))
    assert "--set partitions=4 --set microbatches=16 --set context_parallel_degree=2" in longer
    assert "--set sequence_parallel=false" in in_parts
    along = command(Division(tensor=2, pipeline=4), 16, parse_cluster("8xT4"))
    assert "--set tensor_parallel_degree=2 --set sequence_parallel=true" in along
    division = Division(
        data=2, pipeline=4, chunks=2, schedule="interleaved_1f1b", sharded="optimizer", microbatch=2
    )
    assert command(division, 16, parse_cluster("8xT4")) == (
        "weft run -n 8 --set partitions=4 --set microbatches=16 --set pipeline=interleaved_1f1b "
        "--set placement_strategy=PDT --set chunks=2 --set shard_optimizer_state=true train.py"
    )
    assert "--engine mpirun --mpi-options '-H node1:8,node2:8,...'" in command(
        division, 16, parse_cluster("4x8xT4")
    )


def test_a_rank_with_more_layers_needs_their_memory():
    """The head costs as much as two and a half layers, so ranks before it have nine layers of 32, and not eight."""
    sizes = Sizes(32, 4096, 32, 14336, 128256, 8192, kv_heads=8, gated=True, tied=False)
    job, machines, division = Job(sizes, batch=64), parse_cluster("4xH100"), Division(pipeline=4)
    times = StepTimes(job, machines)
    found = times.shares(division)
    assert found.ranks == (8, 9, 9, 6)
    assert step_of(job, division, machines).busiest.total == pytest.approx(
        9 * times.of(division)[0].total.total
    )
    first, second = (activation_bytes(job, division, found.part(place)) for place in (0, 1))
    assert second / first == pytest.approx(9 * 3 / (8 * 4))
    whole = memory_of(job, division, found).activations
    assert whole / first == pytest.approx(26 / 24), (
        "weft cuts inside of layers: 8 2/3 of them on the first rank"
    )
    plan = search(job, machines, memory_bytes=2**40).of_kind["pipeline"]
    assert plan.memory == memory_of(job, plan.division, times.shares(plan.division), True)


def test_shared_parameters_are_gathered_as_the_plan_reckons():
    shared = settings_of(Division(pipeline=2, data=2, sharded="parameters"), microbatches=4)
    assert shared["sharded_data_parallel_degree"] == 2
    assert shared["sharded_parameters_gathered"] == "microbatch"
    alone = settings_of(Division(data=2, sharded="parameters"), microbatches=4)
    assert "sharded_parameters_gathered" not in alone  # PyTorch's FSDP2
