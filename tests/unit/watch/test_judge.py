"""Verdicts on ranks, with a clock that the test turns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from weft.watch.heartbeat import Sign, State
from weft.watch.judge import (
    CALL_SECONDS,
    HANDLER_NOTES,
    HANDLER_SECONDS,
    LEAVE_SECONDS,
    Handler,
    Judge,
    Verdict,
    leaving_text,
)

FORWARD = Sign(State.RUNNING, pid=7, heartbeat=2.0, stall=10.0, notes=1, step=3, phase="forward", host="node")
RECEIVE = replace(FORWARD, phase="receive")
FINISHING = replace(FORWARD, state=State.FINISHING, phase="")
FINISHED = replace(FORWARD, state=State.FINISHED)


class Watch:
    """A judge that looks ten times a second at signs whose beats go on, but for the frozen ranks."""

    def __init__(self, sees_all: bool = True) -> None:
        self.judge = Judge(sees_all)
        self.now = 0.0
        self.beats = 0

    def look(self, seconds: float, signs: dict[int, Sign], frozen: tuple[int, ...] = ()) -> Verdict | None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.beats += 1
            seen = {
                rank: sign if rank in frozen else replace(sign, beat=self.beats)
                for rank, sign in signs.items()
            }
            verdict = self.judge.observe(self.now, seen)
            if verdict is not None:
                return verdict
        return None


def test_ranks_that_beat_are_left_alone():
    assert Watch().look(60, {0: FORWARD, 1: FORWARD}) is None


def test_ranks_that_have_not_started_or_have_finished_are_left_alone():
    assert Watch().look(60, {0: Sign(), 1: FINISHED}, frozen=(0, 1)) is None


def test_a_rank_without_beat_is_frozen():
    watch = Watch()
    verdict = watch.look(60, {0: FORWARD, 1: FORWARD}, frozen=(1,))
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("frozen", (1,))
    assert re.fullmatch(
        r"rank 1 on node \(pid 7\) is frozen: no heartbeat for 2\.\d s; last seen in step 3, forward",
        verdict.text,
    )
    assert watch.now == pytest.approx(2.2, abs=0.11)


def test_the_rank_that_was_silent_first_is_named_first():
    watch = Watch()
    assert watch.look(0.5, {0: FORWARD, 1: FORWARD}, frozen=(1,)) is None
    verdict = watch.look(5, {0: FORWARD, 1: FORWARD}, frozen=(0, 1))
    assert verdict is not None and verdict.ranks[0] == 1


def test_a_pause_shorter_than_the_limit_is_survived():
    watch = Watch()
    for _ in range(5):
        assert watch.look(1.8, {0: FORWARD, 1: FORWARD}, frozen=(1,)) is None
        assert watch.look(0.2, {0: FORWARD, 1: FORWARD}) is None


def test_time_in_which_the_judge_slept_counts_for_nobody():
    watch = Watch()
    signs = {0: FORWARD, 1: FORWARD}
    assert watch.look(1, signs, frozen=(0, 1)) is None
    watch.now += 3600
    assert watch.look(0.3, signs, frozen=(0, 1)) is None
    assert watch.look(2, signs) is None


def test_a_rank_that_came_to_its_end_while_another_waits_for_it_has_left():
    watch = Watch()
    verdict = watch.look(60, {0: replace(RECEIVE, peer=1), 1: FINISHING, 2: FORWARD})
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("left", (1,))
    assert (
        verdict.text == "rank 1 on node (pid 7) left at step 3 while rank 0 still needs it: step 3, receive"
    )
    assert watch.now == pytest.approx(LEAVE_SECONDS, abs=0.3)


def test_nobody_has_left_as_long_as_somebody_works():
    assert Watch().look(9, {0: RECEIVE, 1: FINISHING, 2: FORWARD}) is None
    assert Watch().look(60, {0: FORWARD, 1: FINISHING}) is None
    assert Watch().look(9, {0: FINISHING, 1: FINISHING}) is None


def test_ranks_that_do_not_come_to_their_end_together_are_told():
    verdict = Watch().look(60, {0: FINISHING, 1: FINISHING})
    assert verdict is not None and verdict.kind == "stalled"
    assert verdict.text.startswith(
        "all ranks wait for each other: rank 0 on node (pid 7) in step 3, barrier of the job's end"
    )


def test_if_all_others_wait_somebody_has_left():
    verdict = Watch().look(60, {0: RECEIVE, 1: FINISHING, 2: RECEIVE})
    assert verdict is not None and verdict.kind == "left"


def test_a_rank_that_has_waited_for_long_has_the_same_patience_with_one_that_came_to_its_end_just_now():
    watch, waiting = Watch(), replace(RECEIVE, peer=1)
    assert watch.look(9, {0: waiting, 1: FORWARD}) is None
    assert watch.look(LEAVE_SECONDS - 0.3, {0: waiting, 1: FINISHING}) is None
    verdict = watch.look(1, {0: waiting, 1: FINISHING})
    assert verdict is not None and verdict.kind == "left"


def test_a_rank_that_waits_for_a_file_is_not_frozen():
    watch, waiting = Watch(), replace(FORWARD, operation="reads /data/part-3", operation_s=2.0)
    assert watch.look(60, {0: FORWARD, 1: waiting}, frozen=(1,)) is None
    verdict = watch.look(60, {0: RECEIVE, 1: waiting}, frozen=(1,))
    assert verdict is not None and verdict.kind == "stalled"
    assert verdict.text.startswith(
        "no rank gets on: rank 1 on node (pid 7) in step 3, forward, reads /data/part-3 for "
    )


def test_a_rank_that_gets_on_resets_the_patience():
    watch = Watch()
    for notes in range(1, 20):
        waiting = replace(RECEIVE, notes=notes, peer=1)
        assert watch.look(LEAVE_SECONDS - 0.3, {0: waiting, 1: FINISHING}) is None


def test_a_job_in_which_nobody_gets_on_is_stalled():
    watch = Watch()
    verdict = watch.look(60, {0: RECEIVE, 1: replace(FORWARD, module="a")})
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stalled", (1,))
    assert re.fullmatch(
        r"no rank gets on: rank 1 on node \(pid 7\) in step 3, forward of a for 10\.\d s; "
        r"rank 0 on node \(pid 7\) in step 3, receive for 10\.\d s",
        verdict.text,
    )
    assert watch.now == pytest.approx(10.2, abs=0.15)


def test_ranks_that_all_wait_blame_the_one_that_is_behind():
    verdict = Watch().look(60, {0: replace(RECEIVE, step=9), 1: replace(RECEIVE, step=7)})
    assert verdict is not None and verdict.ranks == (1, 0)
    assert verdict.text.startswith("all ranks wait for each other: rank 1")


def test_a_call_that_one_rank_alone_makes_is_told_before_the_limit():
    called = replace(FORWARD, stall=600.0, phase="collective", module="state_dict()")
    later = replace(FORWARD, stall=600.0, step=4, phase="wait", peer=0)
    watch = Watch()
    verdict = watch.look(100, {0: called, 1: later, 2: later})
    assert verdict is not None and (verdict.kind, verdict.ranks[0]) == ("stalled", 0)
    assert verdict.text.endswith(". Call state_dict() on every rank, not under `if weft.rank() == 0`")
    assert watch.now == pytest.approx(CALL_SECONDS, abs=0.3)
    for others in (
        {1: later, 2: replace(later, phase="forward")},
        {1: replace(later, step=3)},
        {1: replace(later, peer=None)},
        {1: replace(called, step=4)},
    ):
        assert Watch().look(100, {0: called, **others}) is None, others
    gradients = replace(called, module="the gradients")
    assert Watch().look(100, {0: gradients, 1: later}) is None, "no call of the script's"
    stalled = Watch().look(700, {0: called, 1: called})
    assert stalled is not None and "Call" not in stalled.text, "all have made it"


def test_a_long_computation_that_nobody_waits_for_is_fine():
    assert Watch().look(60, {0: FORWARD, 1: FORWARD}) is None


def test_no_limit_means_no_verdict():
    patient = replace(RECEIVE, heartbeat=0.0, stall=0.0)
    assert Watch().look(60, {0: patient, 1: patient}, frozen=(0, 1)) is None


def test_who_does_not_see_all_concludes_less():
    partial = {0: FINISHING, 1: RECEIVE}
    assert Watch(sees_all=False).look(60, partial) is None
    assert Watch(sees_all=False).look(60, {0: RECEIVE, 1: RECEIVE}) is None
    named = Watch(sees_all=False).look(60, {0: FINISHING, 1: replace(RECEIVE, peer=0)})
    assert named is not None and named.ranks == (0,)
    assert Watch(sees_all=False).look(60, {0: FORWARD, 1: RECEIVE}, frozen=(0,)) is not None


def test_the_words_for_leaving():
    others = {0: RECEIVE, 2: FORWARD}
    assert (
        leaving_text(1, Sign(), others)
        == "rank 1 left while rank 0 and rank 2 still need it: step 3, receive"
    )
    assert leaving_text(1, Sign(), {0: Sign()}) == "rank 1 left while rank 0 still needs it"
    assert leaving_text(1, FORWARD, {0: replace(RECEIVE, step=4)}).endswith(
        "step 4, receive. Rank 1 has no step 4: is a step under `if weft.rank() == 0`, or has its loader fewer batches?"
    )
    called = replace(RECEIVE, phase="collective", module="the optimizer's state_dict()")
    assert leaving_text(1, FORWARD, {0: called}).endswith(
        ". Call the optimizer's state_dict() on every rank, not under `if weft.rank() == 0`"
    )
    models = replace(called, module="the comparison of models and inputs")
    assert ". Rank 1 makes other calls: is a step under" in leaving_text(1, FORWARD, {0: models})


def test_a_rank_may_take_a_while_from_one_job_to_the_next():
    signs = {0: FINISHING, 1: replace(FORWARD, phase="wait", module="weft.init", peer=0)}
    assert Watch().look(3 * LEAVE_SECONDS, signs) is None
    verdict = Watch().look(60, signs)
    assert verdict is not None and verdict.kind == "left"


BARRIER = replace(FORWARD, phase="collective", module="barrier()")
ERROR = ValueError("broken")


def handles(
    signs: dict[int, Sign], error: BaseException | None = ERROR, seconds: float = HANDLER_SECONDS + 1
) -> bool:
    """Whether rank 1 is found to hold up the others after so many seconds."""
    handler = Handler(1)
    return [handler.observe(0.5 * look, error, signs) for look in range(round(2 * seconds))][-1]


def test_a_rank_that_handles_an_exception_while_all_others_wait_elsewhere_ends_the_job():
    assert handles({0: RECEIVE, 1: BARRIER})
    assert handles({0: RECEIVE, 1: replace(FORWARD, phase="")}), "in a collective that weft does not know"
    assert handles({0: RECEIVE, 1: BARRIER, 2: RECEIVE, 3: FINISHED})


def test_handlers_that_hold_up_nobody_are_left_alone():
    assert not handles({0: RECEIVE, 1: BARRIER}, None)
    assert not handles({0: RECEIVE, 1: BARRIER}, KeyboardInterrupt())
    assert not handles({0: RECEIVE, 1: BARRIER}, seconds=HANDLER_SECONDS / 2)
    assert not handles({0: FORWARD, 1: BARRIER}), "rank 0 computes"
    assert not handles({0: BARRIER, 1: BARRIER}), "all ranks have come there"


def test_a_script_that_runs_in_a_handler_is_left_alone():
    """`except ImportError: main()`"""
    handler = Handler(1)
    for number in range(HANDLER_NOTES + 2):
        assert not handler.observe(number, ERROR, {0: RECEIVE, 1: replace(BARRIER, notes=number)})
    signs = {0: RECEIVE, 1: replace(BARRIER, notes=HANDLER_NOTES + 2)}
    assert not any(handler.observe(100.0 + look, ERROR, signs) for look in range(20))
