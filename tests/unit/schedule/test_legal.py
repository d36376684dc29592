from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schedule.cases import Case, any_case
from weft.errors import ScheduleError
from weft.schedule import Schedule, gpipe, in_flight, make
from weft.schedule.legal import check, show
from weft.schedule.schedule import Action


def parse(*rows: str, owners: list[int] | None = None) -> Schedule:
    ranks = tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)
    return Schedule("test", ranks, tuple(range(len(rows)) if owners is None else owners))


LEGAL = {
    "one rank": (["0F0 0B0 0F1 0B1"], None),
    "two ranks": (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], None),
    "split backward": (["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1B1 1W0"], None),
    "two stages a rank": (["0F0 2F0 2B0 0B0", "1F0 1B0"], [0, 1, 0]),
    "both stages on one rank": (["0F0 1F0 1B0 0B0"], [0, 0]),
    "a V": (["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], [0, 1, 1, 0]),
    "uneven, any order": (["1F0 3F0 4F0 4B0 3B0 1B0", "0F0 2F0 2B0 0B0"], [1, 0, 1, 0, 0]),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str):
    rows, owners = LEGAL[name]
    check(parse(*rows, owners=owners), rendezvous=True)


FAULTS = {
    "missing forward": (["0F0 0B0 0B1"], r"rank 0: 0F1 is missing"),
    "missing backward": (["0F0"], r"backward of stage 0, microbatch 0 must be B, or I and W; found nothing"),
    "half a backward": (["0F0 0I0"], r"must be B, or I and W; found I\n  rank 0:  0F0 >0I0<"),
    "two backwards": (["0F0 0B0 0I0 0W0"], r"found B and I and W"),
    "twice": (["0F0 0F0 0B0"], r"rank 0: 0F0 is there twice\n  rank 0: >0F0<>0F0< 0B0"),
    "wrong rank": (["0F0 0B0 1F0", "1B0"], r"1F0 is on the wrong rank, stage 1 is on rank 1"),
    "no such stage": (["0F0 0B0 1F0"], r"1F0 is not among 1 stages and the microbatches from 0"),
    "a send": (["0F0 0SEND_F0 0B0"], r"0SEND_F0 is not one of F, B, I, W"),
    "backward first": (["0B0 0F0"], r"0B0 needs 0F0, which has not run by then\n  rank 0: >0B0< 0F0"),
    "weights first": (["0F0 0W0 0I0"], r"0W0 needs 0I0, which has not run by then"),
    "crossed": (
        ["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"],
        r"ranks 0, 1 wait for each other for ever, even if sends never block\n"
        r"  rank 0:  0F0 >0B0< 0F1  0B1\n  rank 1: >1F1< 1F0  1B0  1B1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_and_marked(name: str):
    rows, text = FAULTS[name]
    with pytest.raises(ScheduleError, match=text):
        check(parse(*rows))


def test_only_with_buffers():
    schedule = parse("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1")
    check(schedule)
    with pytest.raises(ScheduleError, match=r"ranks 0, 1 wait for each .* if a send waits for its receive"):
        check(schedule, rendezvous=True)


def test_a_negative_microbatch():
    with pytest.raises(ScheduleError, match=r"0F-1 is not among 1 stages and the microbatches from 0"):
        check(Schedule("test", ((Action(0, "F", -1),),), (0,)))


def test_limit_on_activations():
    check(gpipe(1, 3), max_in_flight=3)
    with pytest.raises(ScheduleError, match=r"0F2 makes 3 activations in flight, 2 are allowed\n.* >0F2< "):
        check(gpipe(1, 3), max_in_flight=2)


def test_limit_on_activations_counts_stages():
    schedule = parse("0F0 2F0 2B0 0B0", "1F0 1B0", owners=[0, 1, 0])
    check(schedule, max_in_flight=2)
    with pytest.raises(ScheduleError, match=r"rank 0: 2F0 makes 2 activations in flight, 1 are allowed"):
        check(schedule, max_in_flight=1)


def test_limit_in_bytes():
    schedule = parse("0F0 2F0 2I0 0I0 0W0 2W0", "1F0 1B0", owners=[0, 1, 0])
    check(schedule, activation_bytes=[10, 99, 5], memory_bytes=[15, 99])
    with pytest.raises(ScheduleError, match=r"rank 0: 2F0 makes 15 bytes of activations, 14 are allowed"):
        check(schedule, activation_bytes=[10, 99, 5], memory_bytes=[14, 99])
    with pytest.raises(ScheduleError, match=r"rank 1: 1F0 makes 99 bytes of activations, 98 are allowed"):
        check(schedule, activation_bytes=[10, 99, 5], memory_bytes=[15, 98])


def test_sizes_must_fit():
    text = (
        r"^stage 1 is on rank 2, but there are 1 ranks; memory_bytes has 2 numbers, but there are 1 ranks; "
        r"activation_bytes has 0 numbers, but there are 2 stages$"
    )
    with pytest.raises(ScheduleError, match=text):
        check(parse("0F0 0B0", owners=[0, 2]), memory_bytes=[1, 2])


def test_show():
    assert show(parse("0F0 0B0", "1F0"), [(0, 1)]) == "  rank 0:  0F0 >0B0<\n  rank 1:  1F0"


def test_show_leaves_out_what_is_far_from_the_mark():
    lines = show(gpipe(2, 100), [(1, 150)]).splitlines()
    assert lines[0].startswith("  rank 0: ...  0B30  0B31 ") and lines[0].endswith(" 0B69 ...")
    assert ">1B50<" in lines[1]
    assert show(gpipe(1, 100)).endswith("0F39 ...")


@given(any_case(), st.data())
@settings(deadline=None)
def test_dropping_or_doubling_any_action_is_found(case: Case, data: st.DataObject):
    ranks = [list(actions) for actions in case.schedule.ranks]
    rank = data.draw(st.integers(0, len(ranks) - 1))
    index = data.draw(st.integers(0, len(ranks[rank]) - 1))
    if data.draw(st.booleans()):
        ranks[rank].insert(index, ranks[rank][index])
    else:
        del ranks[rank][index]
    broken = replace(case.schedule, ranks=tuple(map(tuple, ranks)))
    with pytest.raises(ScheduleError, match="there twice|is missing|must be B, or I and W"):
        check(broken)


@given(any_case())
@settings(deadline=None)
def test_the_limit_is_exact(case: Case):
    peak = max(map(in_flight, case.schedule.ranks))
    check(case.schedule, max_in_flight=peak)
    with pytest.raises(ScheduleError, match=f"makes {peak} activations in flight, {peak - 1} are allowed"):
        check(case.schedule, max_in_flight=peak - 1)


@given(st.data())
def test_any_order_that_keeps_the_needs_of_one_rank_is_legal(data: st.DataObject):
    """On one rank there is nothing to wait for, so shuffles that keep F before B pass, others fail."""
    microbatches = data.draw(st.integers(1, 4))
    actions = tuple(data.draw(st.permutations(gpipe(1, microbatches).ranks[0])))
    kept = all(
        actions.index(Action(0, "F", i)) < actions.index(Action(0, "B", i)) for i in range(microbatches)
    )
    if kept:
        check(Schedule("test", (actions,), (0,)))
    else:
        with pytest.raises(ScheduleError, match="has not run by then"):
            check(Schedule("test", (actions,), (0,)))


def ends(schedule: Schedule) -> bool:
    """By brute force: any rank whose next action has all it needs runs it."""
    rows = [list(row) for row in schedule.ranks]
    ran = set()
    last = schedule.stages - 1
    moved = True
    while moved:
        moved = False
        for row in rows:
            if not row:
                continue
            stage, kind, i = row[0]
            needed = [(stage - 1, "F", i)] if kind == "F" and stage else []
            if kind in "BI":
                needed = [(stage, "F", i)] + ([(stage + 1, "B", i)] if stage < last else [])
            if kind == "W":
                needed = [(stage, "B", i)]
            if ran.issuperset(needed):
                ran.add((stage, "B" if kind == "I" else kind, i))
                del row[0]
                moved = True
    return not any(rows)


@pytest.mark.parametrize(
    "start",
    [make("gpipe", 2, 2), make("zb_h1", 2, 1), make("zbv", 1, 1), make("interleaved_1f1b", 2, 1)],
    ids=["gpipe", "zb_h1", "zbv", "interleaved_1f1b"],
)
def test_every_order_of_a_small_schedule(start: Schedule):
    """Legal is what comes to its end, no more and no less: all orders of all ranks."""
    verdicts: Counter[bool] = Counter()
    for ranks in product(*(permutations(row) for row in start.ranks)):
        schedule = replace(start, ranks=ranks)
        verdict = ends(schedule)
        verdicts[verdict] += 1
        if verdict:
            check(schedule)
        else:
            with pytest.raises(ScheduleError, match="has not run by then|wait for each other"):
                check(schedule)
    assert verdicts[True] > 0 and verdicts[False] > 0
