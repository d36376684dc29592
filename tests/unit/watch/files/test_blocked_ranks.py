"""What is said of ranks that stand in an operation on a file, with clocks that the test turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.watch.files.blocked_ranks import NAME, NOTHING, BlockedRanks, Standing
from weft.watch.heartbeat import Sign, State

WORKS = Sign(State.RUNNING, pid=7, notes=1, step=3, phase="forward", host="node")
WAITS = replace(WORKS, phase="receive")
SAVES = replace(WORKS, phase="checkpoint")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def reads(seconds: float, operation: str = "reads /data/part-3") -> Sign:
    return replace(WORKS, operation=operation, operation_s=seconds)


def test_an_operation_is_told_when_it_takes_long_and_when_twice_as_long():
    clock = Clock()
    blocked, told = BlockedRanks(clock, lambda: 1000.0 + clock.now), {}
    for clock.now in range(40):
        signs = {0: WAITS, 1: reads(clock.now) if clock.now < 30 else WORKS, 2: SAVES, 3: WORKS}
        text = blocked.observe(signs)
        if clock.now == 20:
            assert blocked.standing == Standing({1: ("reads /data/part-3", 1000.0)}, {0: 1, 2: 1})
        told |= {clock.now: text} if text else {}
    sentence = "rank 1 on node (pid 7) reads /data/part-3 for {} s; waiting for rank 1: rank 0, 2"
    assert told == {
        6: sentence.format("6"), 12: sentence.format("12"), 24: sentence.format("24"),
        30: "rank 1 on node (pid 7) goes on: it stood still for 29 s (reads /data/part-3)",
    }  # fmt: skip
    assert blocked.standing == NOTHING


def test_many_ranks_are_one_line():
    text = BlockedRanks().observe({rank: reads(9.0 + rank) for rank in range(64)})
    assert text.count("\n") == 0 and text.endswith("for 12 s; and 60 more ranks stand so")
    clock = Clock()
    blocked = BlockedRanks(clock)
    for clock.now in (0.0, 9.0):
        text = blocked.observe({0: reads(clock.now), **dict.fromkeys(range(1, 64), WAITS)})
    assert text.endswith("; waiting for rank 0: rank 1, 2, 3, 4 and 59 more")


def test_ranks_wait_for_the_one_whose_message_they_need_or_for_the_first():
    clock = Clock()
    blocked = BlockedRanks(clock)
    signs = {0: replace(WAITS, peer=2), 1: reads(60), 2: reads(20), 3: WAITS, 4: replace(WAITS, peer=0)}
    for clock.now in (0.0, 9.0):
        blocked.observe(signs)
    assert blocked.standing.waiting == {0: 2, 3: 1, 4: 1}


def test_other_commands_read_it(tmp_path: Path):
    clock = Clock()
    blocked = BlockedRanks(clock, lambda: 1000.0)
    blocked.observe({0: WAITS, 1: WORKS})
    blocked.write(tmp_path)
    assert not [*tmp_path.iterdir()], "there is nothing to tell"
    for clock.now in (0.0, 9.0):
        blocked.observe({0: WAITS, 1: reads(8.0)})
    blocked.write(tmp_path)
    told = Standing.read(tmp_path)
    assert told.of(1, 1004.0) == "reads /data/part-3 for 12 s"
    assert told.of(0, 1004.0) == "waits for rank 1, which reads /data/part-3 for 12 s"
    blocked.observe({0: WAITS, 1: WORKS})
    blocked.write(tmp_path)
    assert Standing.read(tmp_path) == NOTHING


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"ranks": 1, "waiting": {}}', '{"ranks": {"x": ["reads", 1]}, "waiting": {}}',
        '{"ranks": {"0": "ab"}, "waiting": {}}', '{"ranks": {}, "waiting": {"0": null}}', "\udc80",
    ],
)  # fmt: skip
def test_a_damaged_file_says_nothing(text: str, tmp_path: Path):
    (tmp_path / NAME).write_bytes(text.encode(errors="surrogateescape"))
    assert Standing.read(tmp_path) == NOTHING
    assert Standing.read(tmp_path / "no folder") == NOTHING
