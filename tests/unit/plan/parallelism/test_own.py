"""A division of one's own: what is printed can be read again, and it is priced as the search prices it."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.graph.experts import Experts
from weft.graph.sizes import Sizes
from weft.machines.cluster import parse_cluster
from weft.plan.parallelism.answer import Asked, answer
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.own import because, parse_division, price
from weft.plan.parallelism.search import Found, divisions, search

MACHINES = parse_cluster("2x8xH100")
JOB = Job(Sizes(16, 1024, 16, 4096, 50000, 1024), batch=64)
MIXED = Job(Sizes(8, 512, 8, 2048, 50000, 512, experts=Experts(8, 2, 2048)), batch=64)
LARGE = Job(Sizes(80, 8192, 64, 28672, 32000, 4096, kv_heads=8, gated=True, tied=False), batch=32)


@pytest.mark.parametrize("job", [JOB, MIXED])
def test_every_division_that_is_printed_can_be_read(job: Job):
    found = [*divisions(job, MACHINES, Found())]
    assert len(found) > 500
    assert all(parse_division(str(one), job, MACHINES) == one for one in found)


@pytest.mark.parametrize(
    "text", ["pp 2, tp 4, mbs 2", "PP=2, tensor=4, microbatch=2", "data 2, tp 4, pp 2, mbs 2"]
)
def test_short_names_and_what_is_left_out(text: str):
    assert parse_division(text, JOB, MACHINES) == Division(2, 4, 2, microbatch=2)


def test_schedules_have_the_names_of_the_field():
    assert parse_division("pp 2, 1f1b", JOB, MACHINES).schedule == "1f1b"
    assert parse_division("pp 2, schedule zbv, chunks 2", JOB, MACHINES).schedule == "zbv"
    assert parse_division("pp 2, ZBV", JOB, MACHINES).chunks == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pp 2, foo", '"foo" says nothing; write "pp 4, tp 8'),
        ("pp", '"pp" says nothing'),
        ("pp 0", '"pp 0" says nothing'),
        ("pp 2 3", '"pp 2 3" says nothing'),
        ("recompute some", '"recompute some" says nothing'),
        ("", '"" says nothing'),
        ("pp 3", "it has 15 ranks, the machines 16"),
        ("tp 16", "tensor x context, 16, does not divide a host's 8 accelerators"),
        ("tp 2, cp 3", "tensor x context, 6, does not divide a host's 8 accelerators"),
        ("cp 3", "1024 tokens do not divide by context 3"),
        ("pp 2, zbv x3", "zbv has 2 chunks, not 3"),
        ("pp 2, schedule zbv", "zbv has 2 chunks, not 1"),
        ("pp 2, 1f1b x2", "2 chunks belong to interleaved_1f1b, not to 1f1b"),
        ("pp 2, interleaved_1f1b x3", "layers that divide by pipeline x chunks, 6"),
        ("pp 2, 1f1b x0", '"1f1b x0" says nothing'),
        ("dp 16, mbs 5", "16 replicas with microbatches of 5 do not divide a batch of 64"),
        ("ep 2", "the model has no experts to share"),
        ("pp 16, zbv x2", "32 stages are more than 16 layers"),
    ],
)
def test_what_cannot_be_is_told(text: str, told: str):
    with pytest.raises(ConfigError, match=".*") as error:
        parse_division(text, JOB, MACHINES)
    assert told in str(error.value)


def test_it_is_priced_as_the_search_does():
    asked = Asked(JOB, MACHINES, division=parse_division("pp 4, tp 4", JOB, MACHINES))
    best = search(JOB, MACHINES).best[0]
    same = price(best.division, JOB, MACHINES, asked.limit_bytes)
    assert (same.plan.seconds, same.plan.memory, same.fits) == (best.seconds, best.memory, True)
    own = answer(asked).own
    assert own is not None and own.fits and own.plan.seconds > best.seconds
    assert "tensor-parallel sums takes" in because(JOB, own.plan, best)


def test_single_changes_with_which_it_fits_come_where_nothing_does():
    found = answer(Asked(LARGE, MACHINES))
    assert not found.search.best
    changes = [what for what, _ in found.changes]
    settings = [
        "--optimizer adam8bit",
        "--offload weights",
        "--offload optimizer",
        "--gradient-bits 16",
        "--lora 16",
    ]
    assert changes[:5] == settings, "settings before machines, the fastest first"
    assert changes[5:7] == ["B200 in place of H100", "H200 in place of H100"]
    assert changes[7:] == ["--lora 16 --quantized 4, which weft does not run today"]
    assert answer(Asked(JOB, MACHINES)).changes == []


def test_heads_of_keys_count():
    job = Job(Sizes(16, 1536, 12, 4096, 50000, 1024, kv_heads=3), batch=64)
    with pytest.raises(ConfigError, match="12 heads .3 of keys. do not divide by tensor 2"):
        parse_division("tp 2", job, MACHINES)
