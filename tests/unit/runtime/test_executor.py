"""Real executors on a fake network, one thread for each rank; the bodies send and receive numbers."""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.runtime.toys import chain, one_rank, put_all
from weft import schedule
from weft.errors import PeerError, StallError, UsageError
from weft.runtime import executor as executor_module
from weft.runtime.executor import Executor, Hooks
from weft.runtime.microbatch import Cancelled, Microbatch, Visits
from weft.schedule.order import Order
from weft.schedule.schedule import Action
from weft.transport.channel import VALUE, Key, Mailbox, Message

FOLLOWED = {
    ("1f1b", 3, 4): (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ),
    ("1f1b", 2, 2): ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"),
    ("1f1b", 2, 1): ("0F0 0B0", "1F0 1B0"),
    ("gpipe", 2, 3): ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"),
}


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor(Mailbox(), wait_timeout_s=20)
    yield executor
    executor.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The executor's clock, moved by hand: ``seconds``."""
    clock = SimpleNamespace(seconds=100.0)
    clock.perf_counter = lambda: clock.seconds
    monkeypatch.setattr(executor_module, "time", clock)
    return clock


class Late(Mailbox):
    """Something arrives, or fails, only once somebody waits for it."""

    def __init__(self, happens: Callable[[Mailbox], None]) -> None:
        super().__init__()
        self._happens: Callable[[Mailbox], None] | None = happens

    def wait(self, seen: int, timeout_s: float) -> int:
        if self._happens is not None:
            happens, self._happens = self._happens, None
            happens(self)
        return super().wait(seen, timeout_s)


def order_of(text: str, limit: int = 99) -> Order:
    return Order.of([Action.parse(part) for part in text.split()], limit)


@pytest.mark.parametrize(("kind", "stages", "microbatches"), FOLLOWED)
def test_the_list_is_followed_exactly_when_everything_is_there(kind: str, stages: int, microbatches: int):
    table = FOLLOWED[kind, stages, microbatches]
    lists = schedule.make(kind, stages, microbatches, active=stages + 2).ranks
    for number, expected in enumerate(table):
        assert " ".join(map(str, lists[number])) == expected
        rank = one_rank(number, stages)
        put_all(rank, microbatches)
        rank.run([chain(rank) for _ in range(microbatches)], order_of(expected))
        assert " ".join(f"{number}{did}" for did in rank.did) == expected
        rank.executor.close()


def test_another_microbatch_goes_on_when_one_waits(executor: Executor):
    key = Key(VALUE, 0, 0, 1)
    events = []

    def waits(microbatch: Microbatch) -> str:
        events.append("0 waits")
        got = microbatch.receive(1, key, "a number").payload
        events.append(f"0 has {got}")
        return "first"

    def sends(microbatch: Microbatch) -> str:
        events.append("1 sends")
        executor.mailbox.put(1, Message(key, payload=42))
        return "second"

    assert executor.run([waits, sends], order_of("0F0 0F1")) == ["first", "second"]
    assert events == ["0 waits", "1 sends", "0 has 42"]


def followers(executor: Executor, visits: int, known: Visits) -> list[str]:
    """Two microbatches pass a place `visits` times each; what the first needs for each comes only when it must."""
    events: list[str] = []

    def body(microbatch: Microbatch) -> None:
        microbatch.visits = known
        for visit in range(visits):
            if microbatch.index == 0:
                microbatch.receive(1, Key(VALUE, 0, 0, visit))
            elif visit == 0:
                events.append("1 is there")
                for number in range(visits):
                    executor.mailbox.put(1, Message(Key(VALUE, 0, 0, number)))
            microbatch.follow("place")
            events.append(f"{microbatch.index} passes")
            microbatch.passed("place", wrote=True)
        if microbatch.index == 0:
            microbatch.begin("B")

    executor.run([body] * 2, order_of("0F0 0F1 0B0 0B1"))
    return events


def test_whoever_follows_waits_for_the_one_before(executor: Executor):
    assert followers(executor, 1, passed(1)) == ["1 is there", "0 passes", "1 passes"]


def passed(*times: int) -> Visits:
    """The knowledge after microbatches have passed the place so often."""
    known = Visits()
    for number in times:
        known.end({"place": number})
    return known


@pytest.mark.parametrize("times", [(), (2,), (2, 2), (1, 2), (2, 3), (5,)])
def test_it_waits_for_as_many_times_as_microbatches_pass(executor: Executor, times: tuple[int, ...]):
    """Until the one before has ended, if that is not known, was not always the same, or is more than it does."""
    assert followers(executor, 2, passed(*times)) == [
        "1 is there",
        "0 passes",
        "0 passes",
        "1 passes",
        "1 passes",
    ]


def test_one_that_passes_more_often_than_others_did_is_refused(executor: Executor):
    known, key = passed(1), Key(VALUE, 0, 0, 0)

    def body(microbatch: Microbatch) -> None:
        microbatch.visits = known
        for visit in range(2 - microbatch.index):
            if visit:
                microbatch.receive(1, key)
            microbatch.follow("place")
            microbatch.passed("place", wrote=True)
        executor.mailbox.put(1, Message(key))

    told = "place has buffers .* calls it 2 times, after 0 backward passes, more often"
    with pytest.raises(UsageError, match=told):
        executor.run([body] * 2, order_of("0F0 0F1 0B0 0B1"))


def test_the_one_that_could_run_and_stands_first_is_next(executor: Executor):
    """Three wait; then their messages come together, in the wrong order."""
    keys = [Key(VALUE, 0, index, 0) for index in range(3)]
    went_on: list[int] = []

    def body(microbatch: Microbatch) -> None:
        if microbatch.index == 3:
            for key in reversed(keys):
                executor.mailbox.put(1, Message(key))
            return
        microbatch.receive(1, keys[microbatch.index])
        went_on.append(microbatch.index)

    executor.run([body] * 4, order_of("0F0 0F1 0F2 0F3"))
    assert went_on == [0, 1, 2]


def test_a_microbatch_that_the_list_does_not_know_runs_all_the_same(executor: Executor):
    def body(microbatch: Microbatch) -> int:
        microbatch.begin("B")
        return microbatch.index

    assert executor.run([body] * 4, Order({("F", 0): 0}, limit=2)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [("0F0 0F1 0B0 0F2 0B1 0B2", 9, 2), ("0F0 0F1 0F2 0B0 0B1 0B2", 2, 2), ("0F0 0F1", 9, 2), ("", 5, 1)],
)
def test_the_limit_is_what_the_list_holds_at_most(text: str, limit: int, expected: int):
    assert order_of(text, limit).limit == expected


# --- failures -------------------------------------------------------------------------------------------


def test_an_exception_in_one_body_unwinds_the_others_and_is_raised(executor: Executor):
    unwound = []

    def waits(microbatch: Microbatch) -> None:
        try:
            microbatch.receive(1, Key(VALUE, 0, microbatch.index, 0))
        except Exception:
            unwound.append("caught as an Exception")
        finally:
            unwound.append((microbatch.index, threading.current_thread().name.rpartition("-")[0]))

    def fails(microbatch: Microbatch) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        executor.run([waits, waits, fails, waits], order_of("0F0 0F1 0F2 0F3"))
    assert unwound == [(0, "weft-microbatch"), (1, "weft-microbatch")], "3 never began"


def test_after_a_failure_the_executor_runs_again(executor: Executor):
    def fails(microbatch: Microbatch) -> int:
        if microbatch.index == 1:
            raise KeyError("once")
        return microbatch.receive(1, Key(VALUE, 0, 0, 0)).payload

    with pytest.raises(KeyError):
        executor.run([fails] * 2, order_of("0F0 0F1"))
    executor.mailbox.put(1, Message(Key(VALUE, 0, 0, 0), payload=5))
    executor.mailbox.put(1, Message(Key(VALUE, 0, 0, 0), payload=6))
    again = [lambda m: m.receive(1, Key(VALUE, 0, 0, 0)).payload] * 2
    assert executor.run(again, order_of("0F0 0F1")) == [5, 6]


def test_whoever_swallows_the_unwinding_is_unwound_at_the_next_wait(executor: Executor):
    reached = []

    def stubborn(microbatch: Microbatch) -> None:
        try:
            microbatch.receive(1, Key(VALUE, 0, 0, 0))
        except BaseException:
            reached.append("swallowed")
        microbatch.begin("B")
        reached.append("went on")

    def fails(microbatch: Microbatch) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        executor.run([stubborn, fails], order_of("0F0 0F1"))
    assert reached == ["swallowed"]


def test_leaving_the_script_in_a_body_leaves_it(executor: Executor):
    def leaves(microbatch: Microbatch) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        executor.run([leaves], order_of("0F0"))
    assert caught.value.code == 3


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where pytest runs in the background of a shell, which has its jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_a_body_runs_unwinds_and_the_executor_runs_again(
    executor: Executor, interruptible: None
):
    unwound = []

    def waits(microbatch: Microbatch) -> None:
        try:
            microbatch.receive(1, Key(VALUE, 0, 0, 0))
        finally:
            unwound.append(microbatch.index)

    def interrupted(microbatch: Microbatch) -> None:
        try:
            time.sleep(0.05)  # the caller's thread is to wait by now
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while not executor._interrupted:
                time.sleep(0.01)
            microbatch.begin("B")
            unwound.append("went on")
        finally:
            unwound.append(microbatch.index)

    with pytest.raises(KeyboardInterrupt):
        executor.run([waits, interrupted], order_of("0F0 0F1"))
    assert sorted(map(str, unwound)) == ["0", "1"]
    assert executor.run([lambda m: m.index] * 3, order_of("0F0 0F1 0F2")) == [0, 1, 2]


class InterruptedLock:
    """A lock on which an interrupt comes in the moment in which it is acquired, once."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.interrupts = 1

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        acquired: bool = self.lock.acquire(*args, **kwargs)
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return acquired

    def release(self) -> None:
        self.lock.release()


def test_an_interrupt_when_the_turn_was_given_back_already_is_no_hang(executor: Executor):
    executor._back = cast(Any, InterruptedLock(executor._back))
    with pytest.raises(KeyboardInterrupt):
        executor.run([lambda m: m.index] * 2, order_of("0F0 0F1"))
    assert executor.run([lambda m: m.index] * 3, order_of("0F0 0F1 0F2")) == [0, 1, 2]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_may_run_ahead_of_its_list_while_it_would_wait(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, ahead: int
):
    """The list holds one microbatch at a time, and what the first one waits for comes from the second one's forward."""
    monkeypatch.setattr(executor_module, "POLL_S", 0.05)
    executor.wait_timeout_s = 0.2
    key = Key(VALUE, 0, 0, 0)

    def waits(microbatch: Microbatch) -> str:
        microbatch.begin("B")
        microbatch.receive(1, key)
        return "waited"

    def gives(microbatch: Microbatch) -> str:
        executor.mailbox.put(1, Message(key))
        return "gave"

    actions = [Action.parse(part) for part in "0F0 0B0 0F1 0B1".split()]
    order = Order.of(actions, 99, ahead=ahead)
    assert order.limit == 1 + ahead
    if ahead:
        assert executor.run([waits, gives], order) == ["waited", "gave"]
    else:
        with pytest.raises(StallError):
            executor.run([waits, gives], order)


def test_a_failure_of_the_mailbox_ends_the_wait():
    unwound = []

    def waits(microbatch: Microbatch) -> None:
        try:
            microbatch.receive(1, Key(VALUE, 0, microbatch.index, 0))
        except Cancelled:
            unwound.append(microbatch.index)
            raise

    error = PeerError(1, "ValueError: there")
    executor = Executor(Late(lambda mailbox: mailbox.fail(error)), wait_timeout_s=3600)
    with pytest.raises(PeerError, match="rank 1 failed: ValueError: there") as caught:
        executor.run([waits] * 2, order_of("0F0 0F1"))
    assert caught.value is error
    assert unwound == [0, 1]
    executor.close()


def test_a_failure_that_was_there_before_is_raised_at_the_first_wait(executor: Executor):
    executor.mailbox.fail(PeerError(1, "gone"))
    with pytest.raises(PeerError, match="gone"):
        executor.run([lambda m: m.receive(1, Key(VALUE, 0, 0, 0))], order_of("0F0"))


def test_a_stall_names_what_every_microbatch_waits_for(executor: Executor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executor_module, "POLL_S", 0.02)
    executor.wait_timeout_s, executor.rank = 0.1, 3

    def waits(microbatch: Microbatch) -> None:
        what = "layers.2" if microbatch.index else ""
        microbatch.receive(microbatch.index + 1, Key(VALUE, 7, microbatch.index, 4), what)

    with pytest.raises(StallError) as caught:
        executor.run([waits] * 2, order_of("0F0 0F1"))
    assert str(caught.value) == (
        "nothing arrived for 0.1 s on pipeline rank 3, which waits: "
        "microbatch 0 for value 4 of microbatch 0 in step 7 from pipeline rank 1; "
        "microbatch 1 for value 4 of microbatch 1 in step 7 from pipeline rank 2 (layers.2). "
        'If a rank may take this long between two steps, raise "wait_timeout" (seconds).'
    )


def test_whatever_arrives_sets_the_wait_back(clock: SimpleNamespace):
    """Something arrives within every 15 s, and what is waited for after 75 s of the 20 s that a wait may last."""
    wanted = Key(VALUE, 0, 0, 4)

    class Slow(Mailbox):
        def wait(self, seen: int, timeout_s: float) -> int:
            clock.seconds += 5.0
            if clock.seconds % 15.0 == 0.0:
                self.put(1, Message(Key(VALUE, 0, 0, self.arrivals), payload="late"))
            return self.arrivals

    executor = Executor(Slow(), wait_timeout_s=20)
    assert executor.run([lambda m: m.receive(1, wanted).payload], order_of("0F0")) == ["late"]
    assert clock.seconds == 165.0
    executor.close()


# --- threads, contexts, records ------------------------------------------------------------------------


def test_threads_are_few_and_reused(executor: Executor):
    def body(microbatch: Microbatch) -> str:
        microbatch.begin("B")
        return threading.current_thread().name

    names = set()
    for _ in range(3):
        names |= set(executor.run([body] * 20, order_of("0F0 0F1 0B0 0F2 0B1 0B2", 2)))
    assert len(names) <= 2
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    executor.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_bodies_run_in_the_context_of_the_caller(executor: Executor):
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("the caller's")

    def body(microbatch: Microbatch) -> str:
        before = variable.get()
        variable.set("changed")
        return before

    assert executor.run([body] * 2, order_of("0F0 0F1")) == ["the caller's"] * 2
    assert variable.get() == "the caller's"


def late(clock: SimpleNamespace, key: Key) -> Executor:
    """That of rank 1; the message comes from rank 0 when it was waited for during 5 s."""

    def happens(mailbox: Mailbox) -> None:
        clock.seconds += 5.0
        mailbox.put(0, Message(key))

    return Executor(Late(happens), rank=1, wait_timeout_s=20)


def test_spans_hold_work_and_no_waiting(clock: SimpleNamespace):
    key = Key(VALUE, 0, 0, 0)
    executor = late(clock, key)

    def body(microbatch: Microbatch) -> None:
        clock.seconds += 1.0
        microbatch.receive(0, key)
        clock.seconds += 2.0
        microbatch.begin("B")
        clock.seconds += 3.0

    executor.run([body], order_of("1F0 1B0"))
    assert [astuple(span)[:5] for span in executor.spans] == [
        (1, "F", 0, 100.0, 101.0),
        (1, "F", 0, 106.0, 108.0),
        (1, "B", 0, 108.0, 111.0),
    ]
    executor.run([lambda m: None], order_of("1F0"))
    assert len(executor.spans) == 1, "spans are those of the last step"
    executor.close()


def test_a_recorder_hears_of_work_waits_and_the_whole_step(clock: SimpleNamespace):
    key = Key(VALUE, 0, 0, 0)
    executor = late(clock, key)
    heard: list[tuple[str, int, float, float, int, int]] = []
    executor.hooks.record = lambda *span: heard.append(span)

    def body(microbatch: Microbatch) -> None:
        microbatch.receive(0, key)
        microbatch.begin("B")
        clock.seconds += 3.0

    executor.run([body], order_of("1F0 1B0"))
    assert heard == [
        ("F", 0, 100.0, 100.0, -1, 1),
        ("wait", 0, 100.0, 105.0, 0, -1),
        ("F", 0, 105.0, 105.0, -1, 1),
        ("B", 0, 105.0, 108.0, -1, 1),
        ("step", -1, 100.0, 108.0, -1, -1),
    ]
    assert [span[2:4] for span in heard if span[0] in "FB"] == [
        (span.start_s, span.end_s) for span in executor.spans
    ]

    def fails(microbatch: Microbatch) -> None:
        raise ValueError("no")

    heard.clear()
    with pytest.raises(ValueError, match="no"):
        executor.run([fails], order_of("1F0"))
    assert [span[0] for span in heard] == ["F", "step"], "a step that fails is recorded too"
    executor.close()


def test_a_thread_that_gives_the_turn_away_is_told_before(executor: Executor):
    order = order_of("1F0 1F1 1I0 1I1 1W0 1W1")
    threads: list[str] = []
    heard: list[tuple[str, int]] = []

    def leave() -> None:
        heard.append((threading.current_thread().name, len(threads)))

    executor.hooks.leave = leave

    def body(microbatch: Microbatch) -> None:
        threads.append(threading.current_thread().name)
        microbatch.begin("B")
        threads.append(threading.current_thread().name)
        microbatch.completed([lambda: threads.append(threading.current_thread().name)])

    executor.run([body, body], order)
    here, one, other = threading.current_thread().name, threads[0], threads[1]
    assert threads == [one, other, one, other, here, here] and len({here, one, other}) == 3
    changes = [(name, number) for number, name in enumerate(threads[:-2], 1) if threads[number] != name]
    assert set(changes) <= set(heard), "whoever worked, as soon as it has"


def test_hooks_begin_every_turn_and_hear_what_the_rank_does(executor: Executor):
    heard: list[object] = []
    executor.hooks = Hooks(
        resume=lambda m: heard.append(f"+{m.index}"),
        note=lambda phase, microbatch, peer: heard.append((phase, microbatch, peer)),
        locate=lambda error: heard.append(type(error)),
    )
    key = Key(VALUE, 0, 0, 0)
    timer = threading.Timer(0.2, executor.mailbox.put, [1, Message(key)])
    timer.start()

    def body(microbatch: Microbatch) -> None:
        microbatch.receive(1, key)
        microbatch.begin("B")
        raise ValueError

    with pytest.raises(ValueError):
        executor.run([body], order_of("0F0 0B0"))
    timer.join()
    forward, backward, wait = ("forward", 0, None), ("backward", 0, None), ("wait", 0, 1)
    assert heard == ["+0", forward, wait, "+0", forward, "+0", backward, ValueError]


def test_results_are_in_order_of_microbatch(executor: Executor):
    keys = [Key(VALUE, 0, index, 0) for index in range(5)]

    def body(microbatch: Microbatch) -> int:
        if microbatch.index == 4:
            for key in reversed(keys):
                executor.mailbox.put(1, Message(key))
        microbatch.receive(1, keys[microbatch.index])
        return microbatch.index

    assert executor.run([body] * 5, order_of("0F0 0F1 0F2 0F3 0F4")) == [0, 1, 2, 3, 4]


def test_no_bodies_no_results(executor: Executor):
    assert executor.run([], order_of("")) == []
