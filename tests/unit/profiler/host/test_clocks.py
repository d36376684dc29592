"""Clocks of hosts: what an exchange finds, how far it may be wrong, and what is made of files that were changed."""

from __future__ import annotations

import json
import math
import os
import time
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.profiler.host.clocks import (
    PINGS,
    Keeper,
    Mark,
    Offset,
    common,
    error_s,
    keep,
    line,
    measure,
    offsets,
)
from weft.profiler.reading import read_recording
from weft.timeline import Span

HERE, THERE, ELSEWHERE = b"h" * 16, b"t" * 16, b"e" * 16


class Wire:
    """Another host's clock, so many seconds ahead, behind a wire whose ways take the times that are given."""

    def __init__(self, ahead_s: float, ways: list[tuple[float, float]]) -> None:
        self.now, self._ahead, self._ways = 100.0, ahead_s, cycle(ways)

    def clock(self) -> float:
        return self.now

    def ask(self) -> float:
        there_s, back_s = next(self._ways)
        self.now += there_s
        told = self.now + self._ahead
        self.now += back_s
        return told


def test_slow_answers_do_not_count():
    ways = [(0.001, 0.001), *[(0.5, 0.002)] * 4]
    mark = measure((wire := Wire(5.0, ways)).ask, wire.clock)
    assert mark.offset_s == pytest.approx(5.0, abs=1e-9) and mark.error_s == pytest.approx(0.001)


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(1e-5, 0.1), st.floats(1e-5, 0.1)), min_size=1, max_size=PINGS),
)
def test_the_truth_is_within_the_bound_however_unlike_the_ways_are(ahead_s, ways):
    mark = measure((wire := Wire(ahead_s, ways)).ask, wire.clock)
    assert abs(mark.offset_s - ahead_s) <= mark.error_s + 1e-9 * max(1.0, abs(ahead_s))


def test_clocks_that_drift_apart():
    found = line([Mark(0, 10, 0.001), Mark(50, 10.5, 0.002), Mark(100, 11, 0.001)])
    assert found.at(50) == pytest.approx(60.5) and found.error_s == pytest.approx(0.002)
    assert found.moved([Span(0, "F", 0, 0, 100)]) == [Span(0, "F", 0, 10, 111)]


def test_one_mark_says_nothing_of_drift():
    assert line([Mark(5, 2, 0.1)]) == Offset(2, 0, 0.1)


def written(folder: Path, clock: bytes, marks: object, of: bytes = HERE, name: str = "node") -> Path:
    path = folder / f"host-{name}.clock.json"
    text = {"weft": "clock", "version": 1, "clock": clock.hex(), "of": of.hex(), "marks": marks}
    path.write_text(json.dumps(text))
    return path


def test_files_of_hosts(tmp_path):
    written(tmp_path, THERE, [[0, 5, 0.25], [10, 6, 0.125]])
    assert offsets(tmp_path) == {HERE: Offset(), THERE: Offset(5, 0.1, 0.25)}
    assert offsets(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "marks",
    [[], [[1, 2]], [[1, 2, -1]], [[1, math.nan, 1]], [[1e300, 0, 0]], "none", [["1", 2, 3]], {"a": 1}],
)
def test_files_that_were_damaged_count_as_not_there(tmp_path, marks):
    written(tmp_path, THERE, marks)
    assert offsets(tmp_path) == {}


def test_what_is_no_identity_counts_as_not_there(tmp_path):
    path = written(tmp_path, THERE, [[0, 5, 0.25]])
    path.write_text(path.read_text().replace(THERE.hex(), "../../etc"))
    assert offsets(tmp_path) == {}


def test_a_pipe_is_not_waited_at(tmp_path):
    os.mkfifo(tmp_path / "host-node.clock.json")
    assert offsets(tmp_path) == {}


def test_the_wall_clock_counts_where_clocks_were_not_compared(tmp_path):
    written(tmp_path, THERE, [[0, 5, 0.25]])
    found = common(offsets(tmp_path), {HERE: 1000.0, THERE: 1007.0, ELSEWHERE: 1003.0})
    assert found[HERE] == Offset() and found[THERE] == Offset(5, 0, 0.25)
    assert found[ELSEWHERE][:2] == (3.0, 0.0) and found[ELSEWHERE].error_s == math.inf
    assert error_s([found[HERE], found[THERE]]) == 0.25 and error_s(found.values()) == math.inf


def test_hosts_without_the_one_of_rank_0_meet_by_it(tmp_path):
    written(tmp_path, THERE, [[0, 5, 0.25], [100, 6, 0.25]], name="a")
    written(tmp_path, ELSEWHERE, [[0, -5, 0.5]], name="b")
    known, found = offsets(tmp_path), common(offsets(tmp_path), {THERE: 0.0, ELSEWHERE: 0.0})
    moment = 40.0  # of the clock ELSEWHERE
    assert known[THERE].at(found[ELSEWHERE].at(moment)) == pytest.approx(known[ELSEWHERE].at(moment))
    assert error_s(found.values()) == 0.75


def test_a_recording_of_two_hosts_lies_on_one_clock(tmp_path):
    from tests.unit.profiler.test_reading import write

    write(tmp_path, 0, 2, [100.0], offset_s=0.0, clock=HERE)
    write(tmp_path, 1, 2, [10.0], offset_s=1234.5, clock=THERE)  # its wall clock is wrong
    written(tmp_path, THERE, [[10, 90.25, 0.01]])
    assert [span.start_s for span in read_recording(tmp_path).timeline.spans] == [0.0, 0.25]


class Told:
    """A store of rank 0, whose clock is 5 ms behind."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}

    def clone(self) -> Told:
        return self

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def time(self) -> float:
        return time.perf_counter() - 0.005


def test_one_rank_of_each_other_host_asks(tmp_path):
    (tmp_path / "host-old.clock.json").write_text("{}")
    store = Told()
    assert keep(tmp_path, 0, store, HERE) is None and not list(tmp_path.iterdir())
    keepers = [keep(tmp_path, rank, store, clock) for rank, clock in ((1, HERE), (2, THERE), (3, THERE))]
    for keeper in keepers:
        assert isinstance(keeper, Keeper)
        keeper.close()
    (path,) = tmp_path.iterdir()
    marks = json.loads(path.read_text())["marks"]
    assert len(marks) in (1, 2)
    assert all(abs(offset_s + 0.005) <= bound_s + 1e-9 for _, offset_s, bound_s in marks)


def test_a_second_recording_into_the_same_folder_compares_clocks_again(tmp_path):
    store = Told()
    for number in (1, 2):
        keep(tmp_path, 0, store, HERE, number)
        assert not list(tmp_path.iterdir())
        keeper = keep(tmp_path, 2, store, THERE, number)
        assert keeper is not None
        keeper.close()
        assert set(offsets(tmp_path)) == {HERE, THERE}


def test_a_store_that_tells_no_time_leaves_it_at_the_wall_clock(tmp_path):
    written(tmp_path, THERE, [[0, 5, 0.25]])
    assert keep(tmp_path, 1, object(), HERE) is None and offsets(tmp_path)
    assert keep(tmp_path, 0, object(), HERE) is None and not offsets(tmp_path)


def test_a_store_that_is_gone_ends_nothing(tmp_path):
    class Gone(Told):
        def get(self, key: str) -> bytes:
            raise RuntimeError("Connection closed")

    keeper = keep(tmp_path, 1, Gone(), THERE)
    assert keeper is not None
    keeper.close()
    assert not list(tmp_path.iterdir())
