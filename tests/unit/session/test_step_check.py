"""Ranks that were called with different things in one step."""

from __future__ import annotations

import json

import pytest

from weft.errors import DivergenceError, PeerError, StallError
from weft.session.step_check import CHANGES, StepCheck, advice_for
from weft.transport.loopback import LoopbackChannel, connect


def checks(channels: list[LoopbackChannel], *calls: str, timeout_s: float = 20.0) -> list[StepCheck]:
    """One for each rank; their ranks in the job are 4, 5, ..."""
    ranks = tuple(range(4, 4 + len(calls)))
    return [
        StepCheck(channel, ranks, me, 7, json.dumps({"step": call}), timeout_s)
        for me, (channel, call) in enumerate(zip(channels, calls, strict=True))
    ]


def test_all_take_what_the_first_rank_gives() -> None:
    first, second, third = checks(connect(3), "train", "train", "train")
    assert [check.begin(own) for check, own in ((first, [1]), (second, [2]), (third, [3]))] == [[1]] * 3
    for check in (first, second, third):
        check.look()
        assert check.waiting == []


def test_a_rank_that_was_called_with_something_else_is_named() -> None:
    first, second = checks(connect(2), "train", "evaluate")
    first.begin(None)
    with pytest.raises(
        DivergenceError,
        match=r'^in step 7 the ranks were called differently: input.step is "train" on rank 4 but "evaluate" on rank 5',
    ):
        second.begin(None)
    with pytest.raises(
        DivergenceError, match=r"same steps in the same order: is one under `if weft.rank\(\) == 0`"
    ):
        first.look()


def test_advice_is_about_the_data_where_the_steps_are_the_same() -> None:
    step, other = {"step": "train", "x": "float32[4]"}, {"step": "train", "x": "float32[6]"}
    assert "read the same batches" in advice_for(map(json.dumps, (step, other)))
    anew = {**other, "step": "train, traced anew for other shapes, types or values"}
    assert "read the same batches" in advice_for(map(json.dumps, (step, anew)))
    changed = {**step, CHANGES: [1, "a.weight needs gradient, float32"]}
    assert "cast them before that" in advice_for(map(json.dumps, (step, changed)))


def test_a_first_rank_that_does_not_come_is_a_stall() -> None:
    _, second = checks(connect(2), "train", "train", timeout_s=0.01)
    with pytest.raises(
        StallError, match=r"^rank 5 began step 7, but rank 4 did not for 0\.01 s: does it call"
    ):
        second.begin(None)


def test_a_first_rank_that_fails_ends_the_wait() -> None:
    channels = connect(2)
    _, second = checks(channels, "train", "train")
    channels[0].abort("ValueError: mine")
    with pytest.raises(PeerError, match="mine"):
        second.begin(None)
