"""Random legal steps: against longest paths where links are free for all, and what holds on any links."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulate.cases import Case, cases, longest_paths, needed
from weft.schedule import CHUNKS, make
from weft.simulate import Links, StageCost, simulate
from weft.timeline import WORK
from weft.topology.cluster import Cluster, Link

links = st.builds(
    Link, st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([4.0, 16.0, 1e9]), st.booleans(), st.just("link")
)
clusters = st.builds(Cluster, st.sampled_from([(4,), (2, 2), (1, 3), (1, 1, 1, 1)]), links, links)


def run(case, links, **more):
    return simulate(case.actions, case.rank_of_stage, case.costs, links, edges=case.edges, **more)


@settings(deadline=None)
@given(cases(), clusters)
def test_ends_are_the_longest_paths(case, cluster):
    def open_link(sender, receiver):
        link = cluster.link(sender, receiver)
        return Link(link.latency_s, link.bytes_per_s)

    step = run(case, Links(open_link))
    paths = longest_paths(case, lambda sender, receiver, size: open_link(sender, receiver).transfer_s(size))
    assert [list(ends) for ends in step.end_s] == [pytest.approx(row) for row in paths]
    assert step.step_s == pytest.approx(max(end for row in paths for end in row))


@pytest.mark.parametrize("name", CHUNKS)
def test_ends_of_every_schedule(name):
    schedule = make(name, ranks=3, microbatches=6)
    costs = [StageCost(1.0 + s / 8, 2.0 + s / 4, 1.0, 1.0 + s / 4, 8, 16) for s in range(schedule.stages)]
    link = Link(0.25, 64.0)
    step = simulate(schedule.ranks, schedule.rank_of_stage, costs, Links.uniform(link))
    case = Case(schedule.ranks, schedule.rank_of_stage, costs, [])
    paths = longest_paths(case, lambda sender, receiver, size: link.transfer_s(size))
    assert [list(ends) for ends in step.end_s] == [pytest.approx(row) for row in paths]


@settings(deadline=None)
@given(cases(least=1, size=8), clusters, st.booleans(), st.sampled_from([0.0, 0.25]))
def test_what_holds_on_any_links(case, cluster, overlap, overhead_s):
    step = run(case, Links(cluster.link, overlap, overhead_s))
    times = {
        action: (start, end)
        for row, starts, ends in zip(case.actions, step.start_s, step.end_s, strict=True)
        for action, start, end in zip(row, starts, ends, strict=True)
    }
    for action, (start, _) in times.items():
        for before in needed(action, times, len(case.costs), case.edges):
            assert start >= times[before][1]
    _one_thing_at_a_time(step, overlap)
    _one_transfer_at_a_time(step, cluster, overhead_s)
    free = run(case, Links())
    for ends, earliest in zip(step.end_s, free.end_s, strict=True):
        assert all(end >= early - 1e-9 for end, early in zip(ends, earliest, strict=True))


def _one_thing_at_a_time(step, overlap):
    for rank in step.timeline.ranks:
        kinds = (*WORK, "recv") if overlap else (*WORK, "send")
        spans = [span for span in step.timeline.of_rank(rank) if span.kind in kinds]
        for before, after in itertools.pairwise(spans):
            assert after.start_s >= before.end_s - 1e-9


def _one_transfer_at_a_time(step, cluster, overhead_s):
    """On a shared link; all transfers are of 8 bytes."""
    arrivals: dict[str, list[float]] = {}
    for rank, kind, *_, start, end, name in step.moves:
        link = cluster.intra_host if "intra" in name else cluster.inter_host
        if kind == "send":
            assert name.startswith(f"host {cluster.host_of(rank)} ")
            assert end >= start + overhead_s + link.transfer_s(8) - 1e-9
        if kind == "send" and link.shared:
            before = arrivals.setdefault(name, [])
            assert not before or end >= before[-1] + link.occupied_s(8) - 1e-9
            before.append(end)


@settings(deadline=None)
@given(cases(), clusters, st.booleans(), st.sampled_from([0.0, 0.25]))
def test_shares_agree_with_the_timeline(case, cluster, overlap, overhead_s):
    ranks = len(case.actions)
    step = run(
        case,
        Links(cluster.link, overlap, overhead_s),
        reduce_s=[0.5] * ranks,
        optimizer_s=[float(rank) for rank in range(ranks)],
    )
    assert step.timeline.duration_s == pytest.approx(step.step_s)
    for rank, idle in enumerate(step.idle):
        assert all(share >= -1e-9 for share in idle)
        assert idle.total == pytest.approx(step.timeline.idle_share(rank))


@settings(deadline=None)
@given(cases(least=1))
def test_peak_memory_is_that_of_what_is_alive(case):
    step = run(case, Links(), copies=3)
    for rank, (row, starts, ends, peak) in enumerate(
        zip(case.actions, step.start_s, step.end_s, step.peak_bytes, strict=True)
    ):
        begin = {action: start for action, start in zip(row, starts, strict=True)}
        finish = {action: end for action, end in zip(row, ends, strict=True)}

        def alive(time, begin=begin, finish=finish):
            total = 0
            for stage, kind, i in begin:
                cost = case.costs[stage]
                if kind != "F" or begin[stage, "F", i] > time:
                    continue
                if (stage, "B", i) in finish:
                    total += cost.activation_bytes * (time < finish[stage, "B", i])
                else:
                    total += (cost.activation_bytes - cost.weight_bytes) * (time < finish[stage, "I", i])
                    total += cost.weight_bytes * (time < finish[stage, "W", i])
            return total

        parameters = sum(
            cost.parameter_bytes
            for cost, owner in zip(case.costs, case.rank_of_stage, strict=True)
            if owner == rank
        )
        assert peak == 3 * parameters + max(map(alive, starts), default=0)


@settings(deadline=None)
@given(cases(), clusters, st.booleans())
def test_the_same_twice(case, cluster, overlap):
    links = Links(cluster.link, overlap, 0.125)
    assert run(case, links) == run(case, links)
