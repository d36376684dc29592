"""The choice `auto`: least simulated step, memory, recomputation, and what it says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import schedule
from weft.errors import PlacementError, ScheduleError
from weft.plan.explain import explain
from weft.plan.option import Option, Placed, options
from weft.plan.search import VISIT, Found, merit, recomputed, search, simulation
from weft.simulate import FREE, Edge, Links, StageCost, executed_order, simulate
from weft.topology.cluster import Link

LINKS = Links.uniform(Link.parse("1GB/s,1ms"), overhead_s=0.002)
STAGE = StageCost(1.0, 2.0, 1.1, 1.2, 10, 10, 100, 60, 50)


def evenly(layout: Sequence[int]) -> Placed:
    """Work for all ranks alike, whatever the number of stages."""
    share = max(layout) + 1, len(layout)
    part = share[0] / share[1]
    return Placed(tuple(scaled(STAGE, part) for _ in layout))


def scaled(stage: StageCost, part: float) -> StageCost:
    times = ("forward_s", "backward_s", "input_s", "weight_s")
    sizes = ("activation_bytes", "weight_bytes", "parameter_bytes")
    return replace(
        stage,
        **{name: getattr(stage, name) * part for name in times},
        **{name: round(getattr(stage, name) * part) for name in sizes},
    )


def one_of(found: Sequence[Found], option: Option) -> Found:
    (one,) = (one for one in found if one.option == option)
    return one


# --- the least step ------------------------------------------------------------------------------------


def by_hand(
    option: Option, ranks: int, microbatches: int, stages: Sequence[StageCost], links: Links
) -> float:
    """The step of an option by direct calls of `make` and `simulate`."""
    if option.recompute:
        stages = recomputed(stages)
    if option.schedule == "list":
        layout = option.layout(ranks)
        costs = [
            schedule.ListCost(
                rank,
                one.forward_s,
                one.input_s if option.splits else one.backward_s,
                one.weight_s if option.splits else None,
                transfer_s=2 * links.overhead_s + links.between(0, 1).transfer_s(one.forward_bytes),
                whole_s=one.backward_s if option.splits else None,
            )
            for rank, one in zip(layout, stages, strict=True)
        ]
        made = schedule.make("list", ranks, microbatches, costs=costs)
    else:
        made = schedule.make(option.schedule, ranks, microbatches, active=option.active, chunks=option.chunks)
    order = executed_order(made.ranks, made.rank_of_stage, stages, links)
    return simulate(order, made.rank_of_stage, stages, links).step_s


TIMES = st.floats(0.1, 4.0)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES), min_size=12, max_size=12),
)
def test_the_best_is_the_option_with_the_least_simulated_step(ranks, microbatches, times):
    def place(layout: Sequence[int]) -> Placed:
        return Placed(tuple(StageCost(*times[stage], 1000, 1000, 10) for stage in range(len(layout))))

    found = search(ranks, microbatches, place, LINKS)
    steps = {
        option: by_hand(option, ranks, microbatches, place(option.layout(ranks)).stages, LINKS)
        for option in options(ranks, microbatches)
    }
    assert {one.option: one.step_s for one in found} == pytest.approx(steps)
    stages_of_a_rank = [len(one.option.layout(ranks)) / ranks for one in found]
    rounded = [
        float(f"{one.step_s * (1 + VISIT * (stages - 1)):.9g}")
        for one, stages in zip(found, stages_of_a_rank, strict=True)
    ]
    assert rounded == sorted(rounded)


@pytest.mark.parametrize(("looped_s", "best"), [(0.99, "1f1b"), (0.97, "interleaved_1f1b")])
def test_a_stage_more_on_a_rank_must_gain_two_percent(looped_s: float, best: str):
    def found(name: str, step_s: float) -> Found:
        return Found(Option(name), schedule=schedule.make(name, ranks=2, microbatches=2), step_s=step_s)

    assert min(found("1f1b", 1.0), found("interleaved_1f1b", looped_s), key=merit).option.schedule == best


def test_a_published_step_is_found():
    found = search(4, 8, evenly, FREE, tried=[Option("1f1b"), Option("gpipe")])
    assert [one.step_s for one in found] == pytest.approx([33.0, 33.0])
    assert found[0].option == Option("1f1b"), "of equal steps the one with less memory"
    assert found[0].bubble == pytest.approx(3 / 11)


def test_what_was_found_can_be_simulated_again():
    edges = (Edge(0, 3, 10),)

    def place(layout: Sequence[int]) -> Placed:
        return replace(evenly(layout), edges=edges)

    for one in search(4, 4, place, LINKS):
        again = simulation(one, LINKS)
        assert again == one.step
        assert (again.step_s, again.bubble, again.peak_bytes) == (one.step_s, one.bubble, one.peak_bytes)


def test_the_same_every_time():
    def summary() -> list[tuple[str, float, tuple[int, ...]]]:
        return [(str(one.option), one.step_s, one.peak_bytes) for one in search(3, 7, evenly, LINKS)]

    assert summary() == summary()


def test_each_layout_is_placed_once():
    asked = []

    def place(layout: Sequence[int]) -> Placed:
        asked.append(tuple(layout))
        return evenly(layout)

    search(2, 4, place, FREE)
    assert len(asked) == len(set(asked))
    assert {(0, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1) * 4} <= set(asked)


def test_options_are_distinct_and_cover_the_schedules():
    found = options(8, 32)
    assert len(set(found)) == len(found)
    assert {option.schedule for option in found} == {*schedule.CHUNKS, "list"}
    assert {option.chunks for option in found if option.schedule == "interleaved_1f1b"} == {2, 3, 4}
    assert {option.active for option in found if option.schedule == "zb_h1"} == {None, 4, 2, 1}
    assert sum(option.recompute for option in found) * 2 == len(found)
    assert {option.active for option in options(1, 8)} == {None}


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (Option("1f1b", active=2), "1f1b, 2 active"),
        (Option("interleaved_1f1b", chunks=3, recompute=True), "interleaved_1f1b, 3 chunks, recompute"),
        (Option("list", like="v", splits=True), "list on v, I and W"),
    ],
)
def test_the_name_of_an_option(option: Option, text: str):
    assert str(option) == text


# --- memory --------------------------------------------------------------------------------------------


def test_what_does_not_fit_falls_out():
    limit = [600] * 4  # 4 x 50 for parameters; 1F1B keeps up to 4 x 100
    tried = [Option("gpipe"), Option("1f1b"), Option("1f1b", active=2)]
    found = search(4, 8, evenly, FREE, memory_bytes=limit, tried=tried)
    assert [(str(one.option), one.fault) for one in found] == [
        ("1f1b", ""),
        ("1f1b, 2 active", ""),
        ("gpipe", "rank 0 needs 1000 B, it has 600 B"),
    ]
    found = search(4, 8, evenly, FREE, memory_bytes=[599, 600, 600, 600], tried=tried)
    assert [str(one.option) for one in found if not one.fault] == ["1f1b, 2 active"]
    assert one_of(found, tried[1]).fault == "rank 0 needs 600 B, it has 599 B"


def test_list_scheduling_keeps_to_the_memory():
    option = Option("list", like="1f1b")
    (found,) = search(4, 8, evenly, FREE, memory_bytes=[400] * 4, tried=[option])
    assert not found.fault and max(found.peak_bytes) <= 400
    (free,) = search(4, 8, evenly, FREE, tried=[option])
    assert found.step_s > free.step_s
    (none,) = search(4, 8, evenly, FREE, memory_bytes=[400, 299, 400, 400], tried=[option])
    assert none.fault == "rank 1 needs 300 B, it has 299 B"


def test_recomputing_takes_less_memory_and_more_time():
    for option in options(4, 8):
        if not option.recompute:
            pair = search(4, 8, evenly, FREE, tried=[option, replace(option, recompute=True)])
            plain, again = (one_of(pair, one) for one in (option, replace(option, recompute=True)))
            assert again.step_s > plain.step_s
            if option.schedule != "list":  # it plans anew, and may leave more W to a rank that has the memory
                assert all(new <= old for new, old in zip(again.peak_bytes, plain.peak_bytes, strict=True))
            if option.active != 1:
                assert again.peak_bytes[0] < plain.peak_bytes[0], option


def test_recomputing_counts_one_microbatch_as_a_whole():
    """Rank 1 of two: inputs of 10 bytes are kept, the 100 are there while a backward pass runs."""
    stages = recomputed([STAGE] * 2)
    assert stages[0].activation_bytes == 0 and stages[0].transient_bytes == 100
    assert stages[1].activation_bytes == 10 and stages[1].transient_bytes == 90
    assert (stages[1].backward_s, stages[1].input_s, stages[1].weight_s) == pytest.approx((3.0, 2.1, 1.2))
    (found,) = search(2, 4, evenly, FREE, tried=[Option("gpipe", recompute=True)])
    assert found.peak_bytes == (4 * 50 + 100, 4 * 50 + 4 * 10 + 90)
    (found,) = search(2, 4, evenly, FREE, tried=[Option("zb_h1", recompute=True)])
    assert found.peak_bytes[0] >= 4 * 50 + 100 and found.peak_bytes[1] >= 4 * 50 + 100


def test_tensors_that_skip_stages_are_inputs_too():
    stages = recomputed([STAGE] * 3, [Edge(0, 2, 30)])
    assert [stage.activation_bytes for stage in stages] == [0, 10, 40]


def test_recomputing_makes_a_large_step_fit():
    found = search(
        2,
        16,
        evenly,
        FREE,
        memory_bytes=[450, 450],
        tried=[Option("gpipe"), Option("gpipe", recompute=True)],
    )
    assert [str(one.option) for one in found if not one.fault] == ["gpipe, recompute"]


def test_a_limit_for_each_rank_is_needed():
    with pytest.raises(ScheduleError, match="^memory_bytes has 1 numbers, but there are 2 ranks$"):
        search(2, 4, evenly, FREE, memory_bytes=[100])


def test_units_are_placed_anew_where_that_makes_an_option_fit():
    """Rank 0 has most parameters unless it is asked to fit."""

    def lopsided(layout: Sequence[int]) -> Placed:
        sizes = [90, 10]
        return Placed(tuple(replace(STAGE, parameter_bytes=size) for size in sizes))

    def within(option: Option) -> Placed:
        if option.schedule == "gpipe":
            raise PlacementError("no way")
        return evenly((0, 1))

    tried = [Option("1f1b"), Option("zb_h1"), Option("gpipe")]
    found = search(2, 4, lopsided, FREE, memory_bytes=[400, 400], tried=tried, within=within)
    assert not one_of(found, tried[0]).fault and not one_of(found, tried[1]).fault
    assert one_of(found, tried[2]).fault == "rank 0 needs 760 B, it has 400 B", "why it was asked"
    assert one_of(search(2, 4, lopsided, FREE, tried=tried, within=within), tried[2]).fault == ""


# --- faults are reasons ---------------------------------------------------------------------------------


def test_a_placement_that_cannot_be_is_a_reason():
    def place(layout: Sequence[int]) -> Placed:
        if len(layout) > 2:
            raise PlacementError("3 units are not enough\nmore about it")
        return evenly(layout)

    found = search(2, 4, place, FREE)
    assert not found[0].fault
    for one in found:
        assert bool(one.fault) == (len(one.option.layout(2)) > 2)
        assert one.fault in ("", "3 units are not enough")


def test_an_option_that_is_none_is_a_reason():
    (found,) = search(2, 4, evenly, FREE, tried=[Option("interleaved_1f1b", chunks=1)])
    assert found.fault == 'chunks is 1, "interleaved_1f1b" takes 2 chunks a rank or more'
    (found,) = search(2, 4, evenly, FREE, tried=[Option("1f1b", active=0)])
    assert found.fault == "active is 0, it must be at least 1"


def test_costs_without_halves_are_for_whole_backward_passes():
    def place(layout: Sequence[int]) -> Placed:
        return Placed(tuple(StageCost(1.0, 2.0) for _ in layout))

    for one in search(2, 4, place, FREE):
        splits = one.option.splits or one.option.schedule in ("zb_h1", "zbv", "v_half", "v_min", "dualpipev")
        assert bool(one.fault) == splits
        assert one.fault in ("", "what I and W take by themselves is not known")


def test_a_rank_that_is_visited_again_is_for_list():
    def place(layout: Sequence[int]) -> Placed:
        return Placed((STAGE,) * 3, rank_of_stage=(0, 1, 0))

    tried = [Option("1f1b"), Option("list", like="1f1b")]
    found = search(2, 4, place, FREE, tried=tried)
    assert found[0].option == tried[1] and found[0].schedule.rank_of_stage == (0, 1, 0)
    assert found[1].fault == (
        "units that must lie together bring microbatches back to rank 0 after stage 1: only list takes such stages"
    )


def test_a_placement_with_too_few_stages_is_refused():
    text = r"^the placement has 3 stages, but 1f1b on 2 ranks has 2$"
    with pytest.raises(PlacementError, match=text):
        search(2, 4, lambda layout: Placed((STAGE,) * 3), FREE, tried=[Option("1f1b")])


# --- what it says ----------------------------------------------------------------------------------------


def test_the_explanation():
    def place(layout: Sequence[int]) -> Placed:
        if len(layout) > 8:
            raise PlacementError("8 units are not enough")
        return evenly(layout)

    found = search(4, 8, place, LINKS, memory_bytes=[700] * 4)
    good = [one for one in found if not one.fault]
    lines = explain(found).splitlines()
    assert lines[0].split() == ["schedule", "step", "ms", "bubble", "peak", "of", "a", "rank"]
    for line, one in zip(lines[1:6], good, strict=False):
        assert line.startswith(f"{one.option} ") and f"{one.step_s * 1e3:.3f}" in line
        assert f"{one.bubble:.1%}" in line and f"{max(one.peak_bytes)} B" in line
    assert lines[6].startswith(f"slower: {good[5].option}; ")
    text = " ".join(" ".join(lines).split())
    assert "fell out: " in text
    assert "8 units are not enough: interleaved_1f1b, 3 chunks; interleaved_1f1b, 4 chunks;" in text
    assert "rank 0 needs 1000 B, it has 700 B: looped_bfs, 2 chunks; gpipe" in text
    for one in found:
        assert str(one.option) in text
    assert max(map(len, lines)) <= 110


def test_the_explanation_where_nothing_is_possible():
    found = search(2, 4, evenly, FREE, memory_bytes=[1, 1], tried=[Option("gpipe"), Option("1f1b")])
    assert explain(found).splitlines() == [
        "no choice is possible",
        "fell out:",
        "  rank 0 needs 400 B, it has 1 B: 1f1b",
        "  rank 0 needs 600 B, it has 1 B: gpipe",
    ]


def test_faults_come_last():
    good, bad = Found(Option("gpipe"), step_s=9.0), Found(Option("gpipe"), fault="no")
    assert sorted([bad, good], key=merit) == [good, bad]
