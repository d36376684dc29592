"""How the failure of a rank is written down, and who is only a victim."""

from __future__ import annotations

import json

import pytest

from weft.errors import PeerError, UsageError
from weft.watch.failure import Failure, chain, first_cause, is_lost_peer, root_cause
from weft.watch.heartbeat import Sign

SIGN = Sign(pid=7, step=3, microbatch=1, phase="forward", module="layers.0", peer=2)


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as raised:
        return raised


def test_a_failure_names_what_and_where():
    failure = Failure.of(caught(ValueError("no\x1b[2J\nmore")), 1, SIGN)
    assert (failure.rank, failure.kind, failure.text) == (1, "ValueError", "no\\x1b[2J more")
    assert failure.where == "step 3, microbatch 1, forward of layers.0"
    assert "test_failure.py" in failure.traceback and "\x1b" not in failure.traceback
    assert not failure.victim and failure.peer is None
    assert failure.headline() == (
        f"rank 1 on {failure.host} (pid {failure.pid}) failed in step 3, microbatch 1, forward of layers.0: "
        "ValueError: no\\x1b[2J more"
    )


def test_an_error_without_a_message():
    assert Failure.of(caught(KeyError()), 0, Sign()).headline().endswith("failed: KeyError")


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        (PeerError(4, "killed"), 4),
        (ConnectionResetError("reset"), 2),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), 2),
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:4711: Connection reset by peer"), 2),
        (RuntimeError("Timed out waiting 30000ms for send operation to complete"), 2),
    ],
)
def test_a_rank_that_lost_its_peer_is_a_victim(error: Exception, peer: int):
    assert is_lost_peer(error)
    for raised in (error, caught(ValueError("wrapped"), error)):
        failure = Failure.of(caught(raised, raised.__cause__), 1, SIGN)
        assert failure.victim and failure.peer == peer


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("Connection closed by peer")])
def test_other_errors_are_the_ranks_own(error: Exception):
    assert not is_lost_peer(error)


def test_the_chain_follows_causes_and_contexts_and_stops_at_circles():
    inner, outer = KeyError("inner"), ValueError("outer")
    assert list(chain(caught(outer, inner))) == [outer, inner]
    inner.__context__ = outer
    assert list(chain(outer)) == [outer, inner]
    hidden = caught(TypeError("hidden"), None)
    hidden.__context__ = inner
    assert list(chain(hidden)) == [hidden]


def test_the_root_cause_is_the_earliest_that_is_no_victim():
    def failure(rank: int, time: float, victim: bool) -> Failure:
        return Failure(rank, "node", 1, "E", "", time=time, victim=victim)

    victim, late, early = failure(0, 1.0, True), failure(1, 3.0, False), failure(2, 2.0, False)
    assert root_cause([victim, late, early]) is early
    assert root_cause([victim]) is victim
    assert root_cause([]) is None


def test_json_and_back():
    failure = Failure.of(caught(ValueError("no")), 1, SIGN)
    assert Failure.from_json(failure.to_json()) == failure


def test_a_long_report_loses_the_start_of_its_traceback():
    failure = Failure(1, "node", 7, "ValueError", "é" * 100, "line\n" * 5000 + "the end")
    text = failure.to_json(4000)
    assert len(text.encode()) <= 4000
    assert json.loads(text)["traceback"].endswith("the end")


@pytest.mark.parametrize(
    "second", [UsageError("only here"), PeerError(0, "gone"), RuntimeError("Broken pipe")]
)
def test_what_a_script_was_handling_comes_before_what_weft_refused_then(second: BaseException):
    with pytest.raises(type(second)) as told:
        try:
            raise ValueError("first")
        finally:
            raise second
    assert first_cause(told.value) is told.value.__context__
    failure = Failure.of(told.value, 1, SIGN)
    assert (failure.kind, failure.text, failure.victim) == ("ValueError", "first", False)
    assert type(second).__name__ in failure.traceback


def test_an_exception_made_of_another_one_is_itself():
    one = caught(KeyError("a"))
    for error in (caught(UsageError("no"), one), caught(ValueError("no"), one)):
        assert first_cause(error) is error
    with pytest.raises(ValueError, match="second") as told:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904
    assert first_cause(told.value) is told.value, "the script says what is wrong"


HANDED_ON = """Caught KeyError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "/venv/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/home/me/data.py", line 9, in __getitem__
    return self.images[name]
           ~~~~~~~~~~~^^^^^^
KeyError: 'cat.png'
"""


def test_what_another_process_hands_on_is_told_by_its_reason_and_its_line():
    """PyTorch raises the worker's whole traceback as one message."""
    failure = Failure.of(caught(RuntimeError(HANDED_ON)), 0, Sign(step=2))
    assert (failure.kind, failure.text) == ("KeyError", "'cat.png' (in DataLoader worker process 3)")
    assert failure.line == "at /home/me/data.py, line 9, in __getitem__: return self.images[name]"
    text = "Caught StopIteration in pin memory thread.\nOriginal Traceback:\n"
    empty = Failure.of(caught(RuntimeError(text)), 0, SIGN)
    assert (empty.kind, empty.text, empty.line) == ("StopIteration", "(in pin memory thread)", "")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (
            "DataLoader worker (pid 7) is killed by signal: Killed. ",
            "ran out of memory: take fewer num_workers",
        ),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible", "make /dev/shm larger"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "num_workers=0 reads in the rank itself"),
    ],
)
def test_a_killed_worker_is_not_blamed_on_the_line_where_the_rank_was(said: str, advice: str):
    failure = Failure.of(caught(RuntimeError(said)), 0, Sign())
    assert failure.text.startswith(said.strip().rstrip(".")) and advice in failure.text
    assert failure.line.startswith("the rank was at ") and not failure.traceback


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), OSError(12, "x")],
)
def test_a_full_memory_has_advice(error: BaseException):
    full = not isinstance(error, OSError)
    assert ("Less memory: smaller microbatches" in Failure.of(caught(error), 0, Sign()).text) is full
