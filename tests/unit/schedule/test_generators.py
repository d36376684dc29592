"""The tables are those in the generators' docstrings, and every schedule passes the one battery."""

from __future__ import annotations

import importlib
import json
import re
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schedule.cases import Case, any_case, numbered
from tests.unit.schedule.clock import by_kind, run
from weft.config import Settings, resolve
from weft.errors import ScheduleError
from weft.schedule import CHUNKS, ListCost, Schedule, in_flight, make
from weft.schedule.generators.interleaved_1f1b import group
from weft.schedule.legal import check
from weft.schedule.schedule import loop, vee
from weft.schedule.transfers import with_transfers

UNIT = by_kind({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
STRICT = ("gpipe", "1f1b", "zb_h1", "v_min")


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def drawn(name: str) -> list[str]:
    """The table in the docstring of the generator's module."""
    module = importlib.import_module(f"weft.schedule.generators.{'one_f_one_b' if name == '1f1b' else name}")
    return re.findall(r"rank \d: (.*)", module.__doc__ or "")


TABLES = {
    "gpipe": (2, 3),
    "1f1b": (3, 4),
    "interleaved_1f1b": (2, 4),
    "looped_bfs": (2, 3),
    "zb_h1": (3, 4),
    "zbv": (2, 3),
    "dualpipev": (2, 4),
    "v_half": (2, 3),
    "v_min": (2, 3),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_table_of_the_docstring(name: str):
    ranks, microbatches = TABLES[name]
    assert rows(make(name, ranks, microbatches)) == drawn(name)


@pytest.mark.parametrize(
    "name", ["1F1B", "GPipe", "Interleaved1F1B", "zbv", "ZBVZeroBubble", "DualPipeV", "zb-h1"]
)
def test_the_names_of_the_field(name: str):
    ours = {"1": "1f1b", "G": "gpipe", "I": "interleaved_1f1b", "z": "zbv", "Z": "zbv", "D": "dualpipev"}
    expected = "zb_h1" if name == "zb-h1" else ours[name[0]]
    assert make(name, 2, 4).name == expected
    assert Settings(pipeline=name).pipeline == expected
    assert resolve({"partitions": 2}, {"WEFT_SET": json.dumps({"pipeline": name})}).pipeline == expected


def test_interleaved_with_one_active_microbatch():
    assert rows(make("1f1b", 2, 2, active=1)) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]


def test_zb_h1_with_one_active_microbatch():
    assert rows(make("zb_h1", 2, 2, active=1)) == ["0F0 0I0 0W0 0F1 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]


def test_fewer_microbatches_than_stages():
    assert rows(make("1f1b", 3, 1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


@given(any_case())
@settings(max_examples=200, deadline=None)
def test_every_schedule_is_legal(case: Case):
    check(case.schedule, max_in_flight=case.held)
    if case.schedule.name in STRICT:
        check(case.schedule, rendezvous=True)


@given(any_case())
@settings(max_examples=60, deadline=None)
def test_every_schedule_ends_with_blocking_sends(case: Case):
    """Sends and receives wait for each other; everything else of a list runs in its order."""
    lists = [deque(actions) for actions in with_transfers(case.schedule)]
    computed = [[action for action in row if len(action.kind) == 1] for row in lists]
    assert computed == [list(actions) for actions in case.schedule.ranks]
    there = set()
    owners = case.schedule.rank_of_stage
    while any(lists):
        moved = False
        for row in lists:
            while row and len(row[0].kind) == 1:
                assert row[0].kind == "W" or missing(case.schedule, row[0]) <= there
                row.popleft()
                moved = True
            if row and row[0].kind.startswith("SEND"):
                stage, kind, i = row[0]
                peer = stage + (1 if kind == "SEND_F" else -1)
                receive = (peer, kind.replace("SEND", "RECV"), i)
                if lists[owners[peer]] and lists[owners[peer]][0] == receive:
                    row.popleft()
                    there.add(lists[owners[peer]].popleft())
                    moved = True
        assert moved, "the ranks wait for each other"


def missing(schedule: Schedule, action) -> set[tuple[int, str, int]]:
    """The receive that must have been before."""
    stage, kind, i = action
    maker = stage - 1 if kind == "F" else stage + 1
    owners = schedule.rank_of_stage
    if not 0 <= maker < schedule.stages or owners[maker] == owners[stage]:
        return set()
    return {(stage, "RECV_F" if kind == "F" else "RECV_B", i)}


@given(numbered())
@settings(max_examples=60, deadline=None)
def test_the_layout_is_as_promised(case: Case):
    schedule = case.schedule
    ranks, chunks = len(schedule.ranks), schedule.stages // len(schedule.ranks)
    is_vee = schedule.name in ("zbv", "v_half", "v_min", "dualpipev")
    assert schedule.rank_of_stage == (vee(ranks) if is_vee else loop(ranks, chunks))
    split = schedule.name in ("zbv", "v_half", "v_min", "zb_h1")
    kinds = {action.kind for row in schedule.ranks for action in row}
    assert kinds == set("FIW" if split else "FB") or (schedule.name == "dualpipev" and kinds <= set("FBIW"))


@given(st.integers(1, 7), st.integers(1, 20), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_interleaved_holds_what_its_docstring_says(ranks: int, microbatches: int, active: int):
    for rank, actions in enumerate(make("1f1b", ranks, microbatches, active=active).ranks):
        assert in_flight(actions) == min(ranks - rank, active, microbatches)


@given(st.integers(1, 8), st.integers(1, 3), st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_the_bounds_on_memory_are_reached(ranks: int, rounds: int, chunks: int):
    """Else the docstrings would promise too little."""
    microbatches = ranks * rounds * 2
    peaks = {
        name: max(map(in_flight, make(name, ranks, microbatches, chunks=chunk).ranks))
        for name, chunk in (*((name, None) for name in CHUNKS), ("interleaved_1f1b", chunks))
    }
    assert peaks["zb_h1"] == peaks["1f1b"] == ranks
    assert peaks["zbv"] == 2 * ranks
    assert peaks["dualpipev"] == 2 * ranks + (microbatches > 1)
    assert peaks["v_half"] == ranks + 1 + (ranks % 2 == 0)
    assert peaks["v_min"] >= (2 * ranks + 4) / 3
    if rounds > 1:
        assert peaks["interleaved_1f1b"] == (chunks - 1) * ranks + 2 * (ranks - 1) + 1


@given(st.integers(1, 20), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_groups_of_looped(ranks: int, microbatches: int):
    groups = group(microbatches, ranks)
    assert [i for members in groups for i in members] == list(range(microbatches))
    assert all(len(members) >= ranks for members in groups) or len(groups) == 1
    assert len(groups[0]) - len(groups[-1]) in (0, 1)


@given(st.integers(1, 7), st.integers(1, 24), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_bubbles_are_those_of_the_papers(p: int, m: int, v: int):
    """With F = I = W = 1 and B = 2; per chunk of a rank, so v stages take v times as long."""

    def bubble(name: str, chunks: int = 1) -> float:
        return run(make(name, p, m, chunks=chunks), UNIT).step - 3 * chunks * m

    assert bubble("gpipe") == bubble("1f1b") == 3 * (p - 1)
    if m >= p:
        assert bubble("interleaved_1f1b", v) == 3 * (p - 1)
        assert bubble("looped_bfs", v) == 3 * (p - 1)
    if m >= 2 * p - 1:
        assert max(run(make("zb_h1", p, m), UNIT).own_bubble) == (p - 1)
        assert max(run(make("zbv", p, m), UNIT).own_bubble) == 0
        assert bubble("v_half", 2) <= 3 * (p - 1)
    if m >= 2 * p:
        assert max(run(make("dualpipev", p, m), UNIT).own_bubble) == p - 1
    if m >= 2 * p and p % 3:
        assert bubble("v_min", 2) <= 4 * (p - 1)


@given(st.floats(0.1, 9), st.floats(0.1, 9), st.floats(0.1, 9), st.integers(2, 6), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_zb_h1_is_never_slower_than_interleaved(f: float, i: float, w: float, p: int, more: int):
    costs = by_kind({"F": f, "I": i, "W": w, "B": i + w})
    h1, peer = (run(make(name, p, p + more), costs).step for name in ("zb_h1", "1f1b"))
    assert h1 <= peer * (1 + 1e-9)


ONE = [ListCost(0, 1.0, 1.0)]


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (
            ("other", 1, 1),
            {},
            r'^there is no schedule "other", write one of 1f1b, gpipe, interleaved_1f1b, .*$',
        ),
        (("gpipe", 0, 1), {}, "^ranks is 0, it must be at least 1$"),
        (
            ("gpipe", 1, 0),
            {"active": 0, "chunks": 0},
            "microbatches is 0, it must be at least 1; active is 0, .*; chunks is 0, it must be at least 1$",
        ),
        (("gpipe", 1, 1), {"chunks": 2}, '^chunks is 2, "gpipe" takes 1 for each rank$'),
        (("zbv", 1, 1), {"chunks": 1}, '^chunks is 1, "zbv" takes 2 for each rank$'),
        (
            ("interleaved_1f1b", 1, 1),
            {"chunks": 1},
            '^chunks is 1, "interleaved_1f1b" takes 2 chunks a rank or more$',
        ),
        (("list", 1, 1), {"chunks": 2, "costs": ONE}, 'chunks is 2, but "list" has the stages of its input'),
        (("gpipe", 1, 1), {"costs": ONE, "text": ""}, 'costs is for "list" only; text is for "file" only'),
        (("gpipe", 1, 1), {"memory_bytes": [1]}, 'memory_bytes is for "list" only'),
        (("list", 1, 1), {}, '^"list" needs costs$'),
        (("file", 1, 1), {}, '^"file" needs text$'),
        (("list", 2, 1), {"costs": ONE}, "list is for 1 ranks and 1 microbatches, but there are 2 and 1"),
        (("file", 1, 2), {"text": "0F0,0B0"}, "file is for 1 ranks and 1 microb.*, but there are 1 and 2"),
    ],
)
def test_faults(arguments, options, text):
    with pytest.raises(ScheduleError, match=text):
        make(*arguments, **options)


def test_make_by_name_takes_costs_and_text():
    assert rows(make("list", 1, 2, costs=ONE, memory_bytes=[0])) == ["0F0 0B0 0F1 0B1"]
    assert rows(make("file", 1, 1, text="0F0,0B0")) == ["0F0 0B0"]
