"""The orders of `torch.distributed.pipelining`, asked of its classes without a process, are those here."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as peer

from weft.errors import FormatError
from weft.schedule import CHUNKS, Schedule, from_csv, make, to_csv
from weft.schedule.file import to_csv_with_transfers
from weft.schedule.schedule import vee

SHAPES = [(2, 2), (2, 6), (3, 3), (4, 4), (4, 8), (4, 10), (5, 7), (8, 16), (8, 27)]
"""(ranks, microbatches) that all of the peer's schedules take."""


def bare(name: str, p: int, m: int, v: int = 1) -> object:
    """An instance that knows its numbers and nothing else."""
    found = object.__new__(getattr(peer, name))
    rounds = max(1, m // p)
    found.__dict__.update(
        pp_group_size=p,
        _num_stages=p * v,
        num_stages=p * v,
        _n_microbatches=m,
        n_local_stages=v,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
        _stages=[None] * v,
    )
    return found


def computed(actions: list[object]) -> list[str]:
    """What is computed, without idle slots and gradient averaging."""
    return [str(action) for action in actions if action is not None and "REDUCE" not in str(action)]


def by_rank(schedule: object, ranks: int) -> list[list[str]]:
    return [computed(schedule._calculate_single_rank_operations(rank)) for rank in range(ranks)]


def ours(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.ranks]


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_simple(p: int, m: int):
    order = bare("ScheduleGPipe", p, m)._get_pipeline_order()
    assert ours(make("gpipe", p, m)) == [computed(order[rank]) for rank in range(p)]


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_interleaved(p: int, m: int):
    """What the peer lists for its last rank names the forwards from 1 to m, which it does not run like that."""
    order = bare("Schedule1F1B", p, m)._get_pipeline_order()
    theirs = [computed(order[rank]) for rank in range(p)]
    assert [action for action in theirs[-1] if "F" in action] == [f"{p - 1}F{i + 1}" for i in range(m)]
    theirs[-1] = [re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) - 1}", action) for action in theirs[-1]]
    assert ours(make("1f1b", p, m)) == theirs


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_looped(p: int, m: int, v: int):
    assert m % max(1, m // p) == 0, "the peer takes no others"
    assert ours(make("interleaved_1f1b", p, m, chunks=v)) == by_rank(
        bare("ScheduleInterleaved1F1B", p, m, v), p
    )


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("v", [2, 3])
def test_looped_bfs_but_for_the_direction_of_backwards(p: int, m: int, v: int):
    theirs = by_rank(bare("ScheduleLoopedBFS", p, m, v), p)
    half = v * m
    for row in theirs:
        chunks = [row[k : k + m] for k in range(half, 2 * half, m)]
        row[half:] = [action for chunk in chunks for action in reversed(chunk)]
    assert ours(make("looped_bfs", p, m, chunks=v)) == theirs


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_zb_h1(p: int, m: int):
    """The peer has it as its interleaved zero-bubble schedule with one chunk."""
    assert ours(make("zb_h1", p, m)) == by_rank(bare("ScheduleInterleavedZeroBubble", p, m), p)


@pytest.mark.parametrize(("p", "m"), [*SHAPES, (4, 1), (6, 3)])
def test_zb_v(p: int, m: int):
    assert ours(make("zbv", p, m)) == by_rank(bare("ScheduleZBVZeroBubble", p, m, 2), p)


@pytest.mark.parametrize(("p", "m"), [shape for shape in SHAPES if shape[1] >= 2 * shape[0]])
def test_dualpipev(p: int, m: int):
    """The peer runs a forward and a backward of different chunks as one action; it takes no fewer microbatches."""
    theirs = bare("ScheduleDualPipeV", p, m, 2)
    theirs.pipeline_order = {rank: theirs._calculate_single_rank_operations(rank) for rank in range(p)}
    rows = [
        [
            part
            for each in theirs.pipeline_order[rank]
            if each
            for part in getattr(each, "sub_actions", None) or [each]
        ]
        for rank in range(p)
    ]
    assert ours(make("dualpipev", p, m)) == [computed(row) for row in rows]


def reader(schedule: Schedule) -> object:
    """The peer's runtime, ready for `_load_csv`."""
    found = object.__new__(peer._PipelineScheduleRuntime)
    found.__dict__.update(
        pipeline_order={},
        pp_group_size=len(schedule.ranks),
        _num_stages=schedule.stages,
        _n_microbatches=schedule.microbatches,
        _stages=[SimpleNamespace() for _ in range(schedule.stages)],
        _defer_pp_recv=False,
        _unshard_lookahead="full",  # since 2.15
        _max_active_stages=3,
        _defer_reduce_grad_wait=False,
        _max_outstanding_sends=None,
    )
    return found


@pytest.mark.parametrize("name", CHUNKS)
def test_the_peer_reads_what_is_written_here(name: str, tmp_path: Path):
    schedule, path = make(name, 4, 8), tmp_path / "schedule.csv"
    path.write_text(to_csv(schedule), encoding="utf-8")
    runtime = reader(schedule)
    runtime._load_csv(path, format="compute_only")
    assert [computed(row) for row in runtime.pipeline_order.values()] == ours(schedule)
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.rank_of_stage))


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
def test_what_the_peer_writes_is_read_here(name: str, format: str, tmp_path: Path):
    schedule, path = make(name, 4, 8), tmp_path / "schedule.csv"
    path.write_text(to_csv(schedule), encoding="utf-8")
    runtime = reader(schedule)
    runtime._load_csv(path)
    runtime._dump_csv(path, format=format)
    read = from_csv(path.read_text(encoding="utf-8"))
    assert (read.ranks, read.rank_of_stage) == (schedule.ranks, schedule.rank_of_stage)


@pytest.mark.parametrize("name", CHUNKS)
def test_the_peer_reads_sends_and_receives(name: str, tmp_path: Path):
    schedule, path = make(name, 4, 8), tmp_path / "schedule.csv"
    waits = hasattr(peer, "WAIT_SEND_F")  # since 2.15
    path.write_text(to_csv_with_transfers(schedule, waits=waits), encoding="utf-8")
    runtime = reader(schedule)
    runtime._load_csv(path, format="compute_comms")
    assert runtime._simulate()


def test_idle_slots_of_the_peer_are_left_out(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    zb_v = bare("ScheduleZBVZeroBubble", 4, 8, 2)
    zb_v.pipeline_order = {rank: zb_v._calculate_single_rank_operations(rank) for rank in range(4)}
    zb_v._dump_csv(path, format="compute_only")
    assert ",," in path.read_text(encoding="utf-8")
    read = from_csv(path.read_text(encoding="utf-8"))
    assert (read.ranks, read.rank_of_stage) == (make("zbv", 4, 8).ranks, vee(4))


def test_overlapped_cells_of_the_peer_are_refused(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    dual = bare("ScheduleDualPipeV", 2, 4, 2)
    dual.pipeline_order = {rank: dual._calculate_single_rank_operations(rank) for rank in range(2)}
    dual._dump_csv(path, format="compute_only")
    with pytest.raises(FormatError, match=r"\)OVERLAP_F_B\" overlaps a forward and a backward"):
        from_csv(path.read_text(encoding="utf-8"))


def test_the_peer_has_no_order_that_is_not_compared():
    classes = {
        name
        for name, found in inspect.getmembers(peer, inspect.isclass)
        if name.startswith("Schedule") and found.__module__ == peer.__name__
    }
    compared = {
        "ScheduleGPipe",
        "Schedule1F1B",
        "ScheduleInterleaved1F1B",
        "ScheduleLoopedBFS",
        "ScheduleInterleavedZeroBubble",
        "ScheduleZBVZeroBubble",
        "ScheduleDualPipeV",
    }
    assert classes == compared
