"""Who is blamed for a failed job."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from weft.launch import root_cause
from weft.launch.root_cause import blame, blame_by, is_failure, only_victims, victims_text
from weft.watch.failure import Failure
from weft.watch.heartbeat import Sign, State
from weft.watch.judge import Verdict

End = partial(root_cause.End, host="node")
RUNNING = Sign(State.RUNNING, pid=1, step=3, phase="forward", notes=1)
SIGNS = {0: RUNNING, 1: RUNNING}


def failure(rank: int, time: float, victim: bool = False) -> Failure:
    text = "lost" if victim else "no"
    return Failure(rank, "node", 40 + rank, "ValueError", text, "trace", "step 3", time, victim)


def test_the_earliest_failure_counts():
    ends = [End(0, 40, 1, 9.1), End(1, 41, 1, 9.2)]
    found = blame(ends, [failure(0, 9.0), failure(1, 8.9)], SIGNS)
    assert found is not None
    assert (found.rank, found.code, found.details) == (1, 1, "trace")
    assert found.headline == "rank 1 on node (pid 41) failed in step 3: ValueError: no"


def test_a_victim_is_not_blamed_even_if_it_was_first():
    ends = [End(0, 40, 1, 9.0), End(1, 41, -9, 9.3)]
    found = blame(ends, [failure(0, 8.9, victim=True)], SIGNS)
    assert found is not None
    assert (found.rank, found.code) == (1, 137)
    assert found.headline.startswith(
        "rank 1 on node (pid 41) was killed by SIGKILL in step 3, forward (by hand"
    )


def test_a_rank_that_reported_is_blamed_before_its_process_has_ended():
    found = blame([End(1, 41, 1, 9.0)], [failure(1, 8.9, victim=True), failure(0, 8.8)], SIGNS)
    assert found is not None
    assert (found.rank, found.code, found.details) == (0, 1, "trace")


def test_the_launcher_waits_while_only_victims_are_known():
    ends = [End(1, 41, 1, 9.0)]
    assert only_victims(ends, [failure(1, 8.9, victim=True)], SIGNS)
    assert not only_victims(ends, [failure(1, 8.9, victim=True), failure(0, 8.8)], SIGNS)
    assert not only_victims([*ends, End(0, 40, -9, 9.1)], [failure(1, 8.9, victim=True)], SIGNS)
    assert not only_victims(ends, [], SIGNS)


def test_a_victim_is_blamed_if_nobody_else_can_be():
    found = blame([End(0, 40, 1, 9.0)], [failure(0, 8.9, victim=True)], SIGNS)
    assert found is not None and found.rank == 0


def test_a_victim_whose_peer_came_to_its_end_blames_that():
    left = Sign(State.FINISHING, pid=41, step=3, host="node")
    victim = replace(failure(0, 8.9, victim=True), peer=1, line="at train.py, line 9, in <module>: step(x)")
    found = blame([End(0, 40, 1, 9.0)], [victim], {0: RUNNING, 1: left})
    assert found is not None and (found.rank, found.code) == (1, 1)
    text = "rank 1 on node (pid 41) left at step 3 while rank 0 still needs it: step 3, forward"
    assert (found.headline, found.details) == (text, "rank 0 stood at train.py, line 9, in <module>: step(x)")


def test_ranks_that_the_launcher_ended_are_not_blamed():
    ends = [End(0, 40, -15, 8.0, ordered=True), End(1, 41, 3, 9.0)]
    found = blame(ends, [], SIGNS)
    assert found is not None
    assert (found.rank, found.code) == (1, 3)
    assert found.headline == "rank 1 on node (pid 41) ended with exit code 3 in step 3, forward"


def test_a_rank_that_left_names_who_needs_it():
    found = blame([End(1, 41, 0, 9.0)], [], SIGNS)
    assert found is not None and found.code == 1
    assert "left at step 3 while rank 0 still needs it" in found.headline
    alone = blame([End(1, 41, 0, 9.0)], [], {0: Sign(State.FINISHED), 1: RUNNING})
    assert alone is not None and "without coming to the end of its script" in alone.headline


def test_a_job_that_ended_well_has_no_culprit():
    assert blame([End(0, 40, 0, 9.0)], [], {0: Sign(State.FINISHED)}) is None


@pytest.mark.parametrize(
    ("code", "state", "failed"),
    [
        (0, State.ABSENT, False),
        (0, State.FINISHED, False),
        (0, State.FINISHING, False),
        (0, State.RUNNING, True),
        (1, State.FINISHED, True),
        (-9, State.ABSENT, True),
    ],
)
def test_what_a_failure_is(code: int, state: State, failed: bool):
    assert is_failure(End(0, 40, code, 0.0), Sign(state)) is failed


def test_a_verdict_keeps_the_exit_code_of_its_rank():
    verdict = Verdict("left", (1,), "rank 1 left")
    assert blame_by(verdict, [End(1, 41, 3, 9.0)]).code == 3
    assert blame_by(verdict, [End(1, 41, 0, 9.0)]).code == 1
    assert blame_by(verdict, []).headline == "rank 1 left"


def test_the_others_are_listed_in_order():
    other = replace(failure(2, 9.2), text="never")
    text = victims_text([other, failure(0, 9.1, victim=True), failure(1, 9.0)], 1)
    assert text.splitlines() == [
        "rank 0 then lost its connection in step 3",
        "also, rank 2 on node (pid 42) failed in step 3: ValueError: never",
    ]


def test_those_that_failed_with_the_culprits_words_are_one_line():
    text = victims_text([failure(2, 9.2), failure(0, 9.1, victim=True), failure(1, 9.0), failure(3, 9.1)], 1)
    assert text.splitlines() == [
        "rank 2, 3 failed with the same words",
        "rank 0 then lost its connection in step 3",
    ]


def test_victims_that_heard_the_culprits_words_are_told_as_such():
    heard = replace(failure(0, 9.1, victim=True), text="no")
    assert victims_text([heard, failure(1, 9.2)], 1) == "rank 0 failed with the same words"


def test_a_signal_without_a_name():
    found = blame([End(1, 41, -42, 9.0)], [], SIGNS)
    assert found is not None and found.code == 170
    assert "signal 42" in found.headline
