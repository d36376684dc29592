"""One rank under watch; other processes are stood for by other boards on the same store or page."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest

from weft.watch.board import Launched, Stored
from weft.watch.failure import Failure
from weft.watch.heartbeat import Page, State
from weft.watch.judge import Verdict
from weft.watch.monitor import Limits, Monitor

torch_distributed = pytest.importorskip("torch.distributed")


@dataclass(frozen=True)
class Seat:
    rank: int = 0
    world_size: int = 1
    launched: bool = False
    shared_fd: int | None = None


def test_a_single_process_is_not_watched():
    hook = sys.excepthook
    monitor = Monitor.start(Seat(), Limits())
    assert sys.excepthook is hook
    monitor.note("forward", 3, 1, "layers.0")
    assert monitor.finish() is True
    monitor.leave()
    assert threading.active_count() >= 1


def test_a_failure_is_placed_where_it_was_raised():
    monitor = Monitor.start(Seat(), Limits())
    error = ValueError("no")
    monitor.note("forward", 3, 1, "layers.0")
    monitor.locate(error)
    monitor.note("wait")
    monitor.locate(error)
    outer = RuntimeError("outer")
    outer.__cause__ = error
    assert monitor.fail(outer).where == "step 3, microbatch 1, forward of layers.0"
    first = monitor.first_failure()
    assert first is not None and first.text == "outer"


def test_finish_waits_for_all_ranks_of_a_page():
    page = Page.private(2)
    boards = [Launched(page, rank) for rank in range(2)]
    monitors = [Monitor(Seat(rank, 2), Limits(stall=20), board) for rank, board in enumerate(boards)]
    for board in boards:
        board.slot.open(2, 20)
    for monitor in monitors:
        monitor._thread = threading.Thread(target=lambda: None)
        monitor._thread.start()
    done: list[bool] = []
    waiting = threading.Thread(target=lambda: done.append(monitors[0].finish()))
    waiting.start()
    time.sleep(0.1)
    assert done == []
    assert monitors[1].finish() is True
    waiting.join(10)
    assert done == [True]
    monitors[1].leave()
    monitors[0].leave()
    assert [sign.state for sign in page.signs().values()] == [State.FINISHED] * 2


def finishing(stall: float) -> tuple[Page, Monitor]:
    page = Page.private(2)
    page.slot(1).open(2, stall)
    board = Launched(page, 0)
    board.slot.open(2, stall)
    monitor = Monitor(Seat(0, 2), Limits(stall=stall), board)
    monitor._thread = threading.Thread(target=lambda: None)
    return page, monitor


def test_finish_does_not_wait_for_ever(capfd: pytest.CaptureFixture[str]):
    _, monitor = finishing(stall=0.2)
    assert monitor.finish() is True
    assert "rank 0 ends without waiting any longer for the others" in capfd.readouterr().err


def test_finish_ends_with_the_job():
    page, monitor = finishing(stall=20)
    page.end()
    assert monitor.finish() is False


class Lost:
    """A store whose owner is gone."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> None:
            raise RuntimeError("Broken pipe")

        return call


def stored(store: Any, rank: int, ranks: int = 2, heartbeat: float = 60.0) -> Stored:
    """A rank's board; a `heartbeat` that is short lets its silence be judged soon."""
    board = Stored(store, rank, ranks, interval=0.02)
    board.slot.open(heartbeat, 60)
    return board


def verdict_of(board: Stored, seconds: float = 10) -> Verdict | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        verdict = board.beat()
        if verdict is not None:
            return verdict
        time.sleep(0.02)
    return None


def test_ranks_see_each_other_through_the_store():
    store = torch_distributed.HashStore()
    boards = [stored(store, rank) for rank in range(2)]
    boards[1].slot.note("forward", 3)
    for _ in range(5):
        assert [board.beat() for board in boards] == [None, None]
        time.sleep(0.03)
    assert boards[0].signs()[1].step == 3
    assert boards[1].signs()[0].state is State.RUNNING
    assert not boards[0].somebody_left
    boards[1].enter(State.FINISHED)
    deadline = time.monotonic() + 10
    while not boards[0].somebody_left and time.monotonic() < deadline:
        time.sleep(0.02)
    assert boards[0].somebody_left
    for board in boards:
        board.close()


def test_a_rank_whose_signs_stop_is_judged_by_rank_0():
    store = torch_distributed.HashStore()
    watching, frozen = stored(store, 0), stored(store, 1, heartbeat=0.05)
    frozen.beat()
    frozen.close()
    verdict = verdict_of(watching)
    assert verdict is not None and (verdict.kind, verdict.ranks) == ("frozen", (1,))
    assert watching.claim_ending() and not frozen.claim_ending()
    third = stored(store, 2, 3)
    assert verdict_of(third, 5) == Verdict("ended", (), "")
    third.close()
    watching.close()


def test_a_process_that_is_gone_is_told_at_once():
    store = torch_distributed.HashStore()
    watching = stored(store, 0)
    gone = stored(store, 1)
    child = subprocess.Popen(["true"])
    child.wait()
    sign = replace(gone.sign(), pid=child.pid)
    gone.sign = lambda: sign  # type: ignore[method-assign]
    gone._publish()
    verdict = verdict_of(watching, 5)
    assert verdict is not None and verdict.kind == "gone"
    assert verdict.text.startswith("rank 1 on ") and verdict.text.endswith(f"(pid {child.pid}) is gone")
    watching.close()


def test_of_several_that_are_gone_the_one_that_lost_nobody_is_told():
    store = torch_distributed.HashStore()
    child = subprocess.Popen(["true"])
    child.wait()
    watching = stored(store, 0, 4)
    for rank in (1, 2, 3):
        board = stored(store, rank, 4)
        sign = replace(board.sign(), pid=child.pid)
        board.sign = lambda sign=sign: sign  # type: ignore[method-assign, misc]
        board._publish()
        if rank != 2:
            board.report(Failure(rank, "node", child.pid, "PeerError", "lost", victim=True))
    verdict = verdict_of(watching, 0.01)
    while len(watching.signs()) < 3:
        verdict = verdict_of(watching, 0.05)
    verdict = watching.gone()
    assert verdict is not None and verdict.ranks == (2,)
    watching.close()


def test_a_rank_that_said_why_before_it_ended_is_told_with_that():
    """Its failure may come after the failures were read for the last time, but before it is seen to be gone."""
    store = torch_distributed.HashStore()
    child = subprocess.Popen(["true"])
    child.wait()
    board = stored(store, 1)
    sign = replace(board.sign(), pid=child.pid)
    board.sign = lambda: sign  # type: ignore[method-assign]
    board._publish()
    board.report(Failure(1, "node", child.pid, "ValueError", "broken", where="step 6"))
    watching = stored(store, 0)
    verdict = verdict_of(watching, 5)
    assert verdict is not None and verdict.ranks == (1,)
    assert verdict.text == f"rank 1 on node (pid {child.pid}) failed in step 6: ValueError: broken"
    watching.close()


def test_a_rank_that_handles_an_exception_sees_all():
    store = torch_distributed.HashStore()
    boards = [stored(store, rank, 3) for rank in range(3)]
    assert boards[2].everybody() == {}, "nobody is known yet"
    deadline = time.monotonic() + 10
    while len(boards[2].everybody()) < 3 and time.monotonic() < deadline:
        for board in boards:
            assert board.beat() is None
        time.sleep(0.02)
    assert {*boards[2].everybody()} == {0, 1, 2}
    assert {*boards[2].signs()} == {0}, "it is not its task to judge the others"
    for board in boards:
        board.close()


def test_rank_0_tells_whom_it_blames_before_it_ends():
    store = torch_distributed.HashStore()
    boards = [stored(store, rank) for rank in range(2)]
    assert boards[1].blamed == ""
    boards[0].blame("rank 3 on node (pid 7) is gone")
    assert boards[1].blamed == "rank 3 on node (pid 7) is gone" and boards[1].ending
    assert stored(Lost(), 1).blamed == ""


def test_a_process_that_said_that_it_finished_is_not_missed():
    """Its last word may come after its sign was read for the last time, but before it is seen to be gone."""
    store = torch_distributed.HashStore()
    child = subprocess.Popen(["true"])
    child.wait()

    def ending(state: State) -> Stored:
        board = stored(store, 1)
        sign = replace(board.sign(), pid=child.pid, state=state)
        board.sign = lambda: sign  # type: ignore[method-assign]
        board._publish()
        return board

    watching = stored(store, 0)
    ending(State.FINISHING)
    while not watching.signs():
        assert watching.beat() is None
    assert watching.gone() is None
    ending(State.FINISHED)
    assert verdict_of(watching, 0.3) is None
    ending(State.FINISHING)
    verdict = verdict_of(watching, 5)
    assert verdict is not None and verdict.kind == "gone", "it never said so"
    watching.close()


def test_a_lost_store_means_that_rank_0_is_gone():
    board = stored(Lost(), 1)
    with pytest.raises(RuntimeError, match="Broken pipe"):
        verdict_of(board, 5)
    assert board.lost().text == "rank 0 does not answer any more"
    assert board.failures() == []


def test_failures_and_ends_go_through_the_store():
    store = torch_distributed.HashStore()
    boards = [stored(store, rank) for rank in range(2)]
    boards[1].report(Failure(1, "node", 7, "ValueError", "no"))
    assert [failure.rank for failure in boards[0].failures()] == [1]
    boards[0].enter(State.FINISHING)
    assert not boards[1].all_finishing()
    boards[1].enter(State.FINISHING)
    assert boards[0].all_finishing() and not boards[0].all_finished()
    boards[0].enter(State.FINISHED)
    boards[1].enter(State.FINISHED)
    assert boards[0].all_finished()


def test_a_victim_tells_what_became_of_the_rank_that_it_lost():
    """Which may be on another host, and may have been lost itself by a rank that failed before."""
    store = torch_distributed.HashStore()
    boards = [stored(store, rank, 3) for rank in range(3)]
    for board in boards:
        board._publish()
    victim = Failure(1, "node", 7, "PeerError", "lost", victim=True, peer=2)
    lost = boards[1].lost_peer(victim)
    assert lost is not None and lost.kind == "gone" and lost.ranks == (2,)
    assert lost.text.startswith("rank 2 on ") and "does not answer any more" in lost.text
    boards[1].report(victim)
    last = boards[0].lost_peer(Failure(0, "node", 6, "PeerError", "lost", victim=True, peer=1))
    assert last == lost, "rank 1 is a victim, too"
    boards[2].enter(State.FINISHING)
    left = boards[1].lost_peer(victim)
    assert left is not None and left.kind == "left"
    assert " left while rank 1 still needs it" in left.text
    boards[2].report(Failure(2, "node", 8, "PeerError", "lost", victim=True, peer=1))
    assert boards[1].lost_peer(victim) is None, "each lost the other: nobody is to blame"
