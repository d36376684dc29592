"""Replicas meet at the end of steps while some are lost at any moment: all agree on each step, and nobody hangs.

Ranks are threads here. One that is struck stops before or after any word that it writes.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from weft.errors import DivergenceError, UsageError
from weft.reduce.meeting import Meeting, Payload
from weft.reduce.members import Table, Word, available

pytestmark = pytest.mark.skipif(not available(), reason="replicas share memory on Linux on x86-64")
STEPS = 12


class Struck(BaseException):
    """The rank was killed."""


class Rank(threading.Thread):
    """One rank of a replica. It counts down the words that it writes, and dies at none."""

    def __init__(
        self, table: Table, replica: int, start: int, position: int, lives: int, mates: list[Rank]
    ) -> None:
        super().__init__(daemon=True)
        self.table, self.place, self.lives, self.mates = table, (replica, start, position), lives, mates
        self.ended, self.error = False, None
        self.weights = torch.full((3,), float(replica), dtype=torch.float64)
        self.history: dict[int, tuple[tuple[int, ...], list[float]]] = {}

    # what a meeting uses of a table
    def __getattr__(self, name: str):
        return getattr(self.table, name)

    def members(self):
        self.live()
        return self.table.members()

    def get(self, *where):
        self.live()
        return self.table.get(*where)

    def put(self, *where):
        self.lives -= 1
        self.live()
        self.table.put(*where)
        self.lives -= 1
        self.live()

    def live(self) -> None:
        if self.lives == 0:
            for mate in self.mates:  # the launcher ends the whole replica
                mate.lives = 0
        if self.lives <= 0:
            raise Struck

    def run(self) -> None:
        replica, start, position = self.place
        meeting = Meeting(self, replica, start, position)
        try:
            if not meeting.joins:
                meeting.begin([self.weights])
            while meeting.steps < STEPS:
                self.step(meeting, replica, position)
            self.ended = True
        except Struck:
            pass
        except BaseException as error:
            self.error = error

    def step(self, meeting: Meeting, replica: int, position: int) -> None:
        # what a step adds follows from the weights, the replica and the position
        gradient = self.weights * 0.5 + replica + 10 * position
        while True:
            payload = Payload([gradient.clone()])
            outcome = meeting.average(payload, asked=False)
            if meeting.hand_over(outcome, payload, self.give, self.take):
                break
        self.weights = self.weights - 0.1 * payload.averaged[0]
        self.history[meeting.steps] = outcome.counted, self.weights.tolist()

    def give(self, write) -> None:
        write(memoryview(bytearray(self.weights.numpy().tobytes())))

    def take(self, content: bytearray) -> None:
        self.weights = torch.frombuffer(content, dtype=torch.float64).clone()


class Jobs:
    """The launcher: starts replicas, begins generations, as `weft.launch.running.replicas` does."""

    def __init__(self, replicas: int, positions: int, draw: random.Random, kills: int) -> None:
        self.table = Table.create(replicas, positions)
        self.draw, self.kills = draw, kills
        self.positions = positions
        self.starts = [0] * replicas
        self.running: dict[int, list[Rank]] = {}
        self.members: dict[int, int] = {}
        self.all: list[Rank] = []
        self.joined: set[int] = set()
        for replica in range(replicas):
            self.start(replica)

    def start(self, replica: int) -> None:
        mates: list[Rank] = []
        start, self.starts[replica] = self.starts[replica], self.starts[replica] + 1
        lives = 10**9
        if self.kills and self.may_die(replica) and self.draw.random() < 0.7:
            self.kills -= 1
            lives = self.draw.randrange(1, 150)
        struck = self.draw.randrange(self.positions)
        for position in range(self.positions):
            mates.append(
                Rank(self.table, replica, start, position, lives if position == struck else 10**9, mates)
            )
        self.running[replica] = mates
        self.all += mates
        for mate in mates:
            mate.start()

    def may_die(self, replica: int) -> bool:
        """The first replica lives in its first start: somebody must have the state."""
        return replica > 0

    def run(self) -> None:
        deadline = time.monotonic() + 20
        while self.running:
            assert time.monotonic() < deadline, f"somebody waits for ever: {self.describe()}"
            time.sleep(0.001)
            self.look()

    def describe(self) -> str:
        """The words of all ranks."""
        words = {
            (replica, position): {word.name: self.table.get(replica, position, word) for word in Word}
            for replica in range(self.table.replicas)
            for position in range(self.positions)
        }
        living = [rank.place for rank in self.all if rank.is_alive()]
        return f"{self.table.members()}, joined {self.joined}, alive {living}, {words}"

    def look(self) -> None:
        for replica, mates in [*self.running.items()]:
            errors = [mate.error for mate in mates if mate.error]
            if errors:
                raise errors[0]
            if any(mate.is_alive() for mate in mates):
                continue
            del self.running[replica]
            self.joined.discard(replica)
            if replica in self.members:
                del self.members[replica]
                self.table.begin(self.members)
            if not all(mate.ended for mate in mates) and not any(m.ended for m in self.all):
                self.start(replica)
        for replica, start in self.members.items():
            if self.table.all_have(replica, Word.JOINED, start):
                self.joined.add(replica)
        ready = {
            each: self.starts[each]
            for each in self.running
            if each not in self.members and self.table.all_have(each, Word.READY, self.starts[each])
        }
        first = not self.table.generation and len(ready) == len(self.running)
        if ready and (first or (self.table.generation and self.joined == self.members.keys())):
            self.members |= ready
            self.table.begin(self.members)
        if not self.joined and any(rank.ended for rank in self.all):  # nobody is left to join
            for mates in self.running.values():
                for mate in mates:
                    mate.lives = 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("replicas", "positions"), [(2, 1), (2, 2), (4, 1), (3, 2)])
def test_all_agree_whoever_is_lost(replicas: int, positions: int, seed: int):
    jobs = Jobs(replicas, positions, random.Random(f"{replicas} {positions} {seed}"), kills=6)
    jobs.run()
    assert any(rank.ended for rank in jobs.all)
    counted: dict[int, tuple[int, ...]] = {}
    for rank in jobs.all:
        for step, (who, _) in rank.history.items():
            assert counted.setdefault(step, who) == who
    assert sorted(counted) == list(range(1, STEPS + 1))
    for position in range(positions):
        weights = torch.zeros(3, dtype=torch.float64)  # the first replica's
        for step in range(1, STEPS + 1):
            gradients = [weights * 0.5 + replica + 10 * position for replica in counted[step]]
            weights = weights - 0.1 * torch.stack(gradients).mean(0)
            for rank in jobs.all:
                if rank.place[2] == position and step in rank.history:
                    found = torch.tensor(rank.history[step][1], dtype=torch.float64)
                    torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-12)


def test_replicas_that_train_other_things_are_found_out():
    table = Table.create(2, 1)
    table.begin({0: 1, 1: 1})
    errors = []

    def meet(replica: int) -> None:
        meeting = Meeting(table, replica, 0, 0)
        meeting.holds = True
        try:
            meeting.average(Payload([torch.zeros(2 + replica)]), asked=False)
        except DivergenceError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=meet, args=(replica,)) for replica in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    assert "the replicas 0 and 1 train other parameters or have other buffers" in "".join(errors)


def test_a_replica_that_joins_with_another_model_ends_alone():
    table = Table.create(3, 1)
    table.begin({0: 1, 1: 1, 2: 1})
    found: dict[int, object] = {}

    def meet(replica: int) -> None:
        meeting = Meeting(table, replica, 0, 0)
        meeting.holds = replica < 2
        payload = Payload([torch.full((2 + replica // 2,), float(replica))])
        try:
            found[replica] = meeting.average(payload, asked=False).counted, payload.averaged[0].tolist()
        except DivergenceError as error:
            found[replica] = str(error)
            table.begin({0: 1, 1: 1})  # as the launcher does when it has ended

    threads = [threading.Thread(target=meet, args=(replica,)) for replica in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found.keys() == {0, 1, 2}
    assert found[0] == found[1] == ((0, 1), [0.5, 0.5])
    assert "the replicas 2 and 0, 1 train other parameters" in str(found[2])


def test_a_state_that_cannot_be_given_ends_the_one_that_joins(caplog: pytest.LogCaptureFixture):
    table = Table.create(2, 1)
    table.begin({0: 1, 1: 1})
    found: dict[int, object] = {}

    def meet(replica: int) -> None:
        meeting = Meeting(table, replica, 0, 0)
        meeting.holds = replica == 0
        payload = Payload([torch.zeros(2)])
        outcome = meeting.average(payload, asked=False)
        try:
            found[replica] = meeting.hand_over(outcome, payload, lambda write: 1 / 0, lambda content: None)
        except UsageError as error:
            found[replica] = str(error)
            table.begin({0: 1})  # as the launcher does when it has ended

    threads = [threading.Thread(target=meet, args=(replica,)) for replica in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: True, 1: "replica 0 cannot give its state to one that joins: its log says why"}
    assert "division by zero" in caplog.text
