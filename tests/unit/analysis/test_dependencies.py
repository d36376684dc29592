"""What a recorded piece needed: steps written by hand, of which each wait has one cause."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from weft.analysis.analysis import Analysis
from weft.analysis.run import Facts, Run
from weft.timeline import Span, Timeline

STEPS = range(1, 6)


def recorded(length_s: float, spans: Iterable[Span], places: Iterable[tuple[int, int]]) -> Analysis:
    """A run whose steps are all like this one; ``places``: the partition and the copy of each rank."""
    every = [
        Span(one.rank, one.kind, one.microbatch, one.start_s + length_s * step, one.end_s + length_s * step, one.stage,
             one.label, step, one.peer)
        for one in spans for step in STEPS
    ]  # fmt: skip
    facts = {rank: Facts(rank, 9, pp_rank=place, rdp_rank=copy) for rank, (place, copy) in enumerate(places)}
    return Analysis(Run("by hand", Timeline(every), facts))


def message(sender: int, receiver: int, microbatch: int, ready_s: float, arrived_s: float) -> list[Span]:
    return [
        Span(
            sender, "send", microbatch, ready_s, arrived_s, label=f"value to rank {receiver}", peer=receiver
        ),
        Span(
            receiver,
            "recv",
            microbatch,
            arrived_s - 0.01,
            arrived_s,
            label=f"value from rank {sender}",
            peer=sender,
        ),
    ]


def test_a_sum_waits_for_the_copies_of_its_partition_only():
    spans = [
        *(Span(0, "step", -1, 0, 9), Span(0, "F", 0, 0, 2, 0), Span(0, "reduce", -1, 2, 9)),
        *(Span(1, "step", -1, 0, 9), Span(1, "F", 0, 0, 8, 0), Span(1, "reduce", -1, 8, 9)),
        *(Span(2, "step", -1, 0, 9), Span(2, "F", 0, 0, 7.5, 1), Span(2, "optimizer", -1, 7.5, 9)),
    ]
    analysis = recorded(9.0, spans, [(0, 0), (0, 1), (1, 0)])
    replay = analysis.replay
    sources = {
        node.rank: {replay.nodes[need.node].rank for need in needs}
        for node, needs in zip(replay.nodes, replay.needs, strict=True)
        if node.kind == "reduce"
    }
    assert sources == {0: {1}, 1: {0}}
    assert {node.end_s - node.start_s for node in replay.nodes if node.kind == "reduce"} == {1.0}
    assert analysis.what_if.fidelity == pytest.approx(0.0)


def test_python_after_a_wait_comes_before_the_work_that_was_waited_for():
    spans = [
        *(
            Span(0, "step", -1, 0, 10),
            Span(0, "F", 0, 0, 3, 0),
            Span(0, "F", 1, 3, 10, 0),
            *message(0, 1, 0, 3, 5),
        ),
        *(Span(1, "step", -1, 0, 10), Span(1, "F", 1, 0, 1, 1), Span(1, "wait", 0, 1, 5, peer=0)),
        Span(1, "F", 0, 6, 10, 1),
    ]
    replay = recorded(10.0, spans, [(0, 0), (1, 0)]).replay
    quick = replay.scaled(lambda node: 0.0 if node.microbatch == 1 else 1.0)
    times = zip(quick.nodes, quick.run(quick.begins_s)[1], strict=True)
    first = next(start_s for node, (start_s, _) in times if node.rank == 1 and node.microbatch == 0)
    assert first - quick.begins_s[1] == pytest.approx(6.0)
    bare = quick.without(("step",))
    times = zip(bare.nodes, bare.run(bare.begins_s)[1], strict=True)
    first = next(start_s for node, (start_s, _) in times if node.rank == 1 and node.microbatch == 0)
    assert first - bare.begins_s[1] == pytest.approx(5.0)


def test_a_rank_waits_between_steps_for_whoever_loads_its_data():
    """The rank that loads has the higher number."""
    spans = [
        *(Span(0, "step", -1, 0, 4), Span(0, "F", 0, 0, 4, 0), Span(0, "wait", -1, 4, 10)),
        *(Span(1, "step", -1, 0, 4), Span(1, "F", 0, 0, 4, 1), Span(1, "data", -1, 4, 10)),
    ]
    found = recorded(10.0, spans, [(0, 0), (1, 0)]).what_if
    assert found.fidelity == pytest.approx(0.0)
    assert found.gain("no data wait") == pytest.approx(0.6)


def test_a_message_that_came_to_a_rank_at_work_says_nothing_of_the_way():
    spans = [
        *(
            Span(0, "step", -1, 0, 10),
            Span(0, "F", 0, 0, 1, 0),
            Span(0, "F", 1, 1, 2, 0),
            Span(0, "F", 2, 2, 8, 0),
        ),
        *(*message(0, 1, 0, 1, 1.125), *message(0, 1, 1, 2, 5.875), *message(0, 1, 2, 8, 8.125)),
        *(Span(1, "step", -1, 0, 10), Span(1, "wait", 0, 0, 1.125, peer=0), Span(1, "F", 0, 1.125, 6, 1)),
        *(Span(1, "F", 1, 6, 7, 1), Span(1, "wait", 2, 7, 8.125, peer=0), Span(1, "F", 2, 8.125, 10, 1)),
    ]
    analysis = recorded(10.0, spans, [(0, 0), (1, 0)])
    took = {need.transfer_s for needs in analysis.replay.needs for need in needs if need.message}
    assert took == {0.125}
    assert analysis.what_if.fidelity == pytest.approx(0.0, abs=1e-9)


def test_work_that_sends_before_its_end_is_two_pieces():
    spans = [
        *(Span(0, "step", -1, 0, 8), Span(0, "F", 0, 0, 8, 0), *message(0, 1, 0, 2, 3)),
        *(Span(1, "step", -1, 0, 8), Span(1, "wait", 0, 0, 3, peer=0), Span(1, "F", 0, 3, 8, 1)),
    ]
    replay = recorded(8.0, spans, [(0, 0), (1, 0)]).replay
    half = replay.scaled(lambda node: 0.5 if node.rank == 0 else 1.0)
    times = zip(half.nodes, half.run(half.begins_s)[1], strict=True)
    first = next(start_s for node, (start_s, _) in times if node.rank == 1 and node.kind == "F")
    assert first - half.begins_s[1] == pytest.approx(1.0 + 1.0)
