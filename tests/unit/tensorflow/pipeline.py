"""Ranks that run a step's programs without TensorFlow: each its own list, with messages that wait for nobody."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.unit.tensorflow.steps import argument, compute, first_value
from weft.schedule.schedule import Action
from weft.tensorflow.execution.program import Program
from weft.tensorflow.split.phases import EVERYWHERE, Phases
from weft.tensorflow.trace.operations import Record, Value


@dataclass
class Rank:
    """One rank: its program, its copy of the variables, and what it has of each microbatch.

    A variable that belongs to another partition is not there, as after the first step.
    """

    record: Record
    program: Program
    order: list[tuple[int, int]]
    number: int
    variables: dict[int, int]
    values: dict[int, dict[Value, int]] = field(default_factory=dict)
    results: dict[tuple[int, int], int] = field(default_factory=dict)
    ran: Counter = field(default_factory=Counter)
    left: Counter = field(default_factory=Counter)
    at: int = 0

    def __post_init__(self) -> None:
        self.left = Counter(
            (index, value) for position, index in self.order for value in self.program.phases[position].inputs
        )

    def run_one(self, channel: dict) -> bool:
        """Run the next phase, if its messages are there."""
        position, index = self.order[self.at]
        phase = self.program.phases[position]
        keys = [(index, number, source, self.number) for number, _, source in phase.receives]
        if any(key not in channel for key in keys):
            return False
        own = self.values.setdefault(index, {})
        for key, (_, value, _) in zip(keys, phase.receives, strict=True):
            sent, own[value] = channel.pop(key)
            assert sent == value
        inside = {value: own[value] for value in phase.inputs}  # a phase sees nothing else
        self.left.subtract((index, value) for value in phase.inputs)
        for number in phase.feeds:
            if self.record.operations[number].variable < 0:
                inside[Value(number, 0)] = argument(number, index)
        for number in phase.operations:
            assert set(self.record.operations[number].controls) & set(phase.operations) <= self._ran(index)
            inside |= compute(self.record, number, inside.__getitem__, self.variables)
            self.ran[number, index] += 1
        own |= {value: inside[value] for value in phase.outputs}
        there = {*phase.outputs, *(value for _, value, _ in phase.receives)}
        for number, (value, has) in enumerate(zip(self.record.results, self.program.results, strict=True)):
            if has and value in there:
                self.results.setdefault((number, index), own[value])
        for number, value, target in phase.sends:
            key = (index, number, self.number, target)
            assert key not in channel
            channel[key] = value, own[value]
        self.values[index] = {value: known for value, known in own.items() if self.left[index, value] > 0}
        self.at += 1
        return True

    def _ran(self, index: int) -> set[int]:
        return {number for number, other in self.ran if other == index}


def own_variables(phases: Phases, rank: int) -> dict[int, int]:
    """The variables that a rank has before the step."""
    return {
        variable: first_value(variable)
        for variable, owner in phases.owner.items()
        if owner in (rank, EVERYWHERE)
    }


def run_together(record: Record, phases: Phases, programs: list[Program], orders: list) -> list[Rank]:
    """Run all ranks to their ends; each goes on for as long as it can.

    Raises:
        AssertionError: They wait for each other, or a message is left.
    """
    ranks = [
        Rank(record, program, order, number, own_variables(phases, number))
        for number, (program, order) in enumerate(zip(programs, orders, strict=True))
    ]
    channel: dict = {}
    while any(rank.at < len(rank.order) for rank in ranks):
        moved = False
        for rank in ranks:
            while rank.at < len(rank.order) and rank.run_one(channel):
                moved = True
        assert moved, "all ranks wait"
    assert not channel, "a message that nobody takes"
    return ranks


def legal_lists(dice: random.Random, stages: tuple[int, ...], microbatches: int) -> list[list[Action]]:
    """Actions of each rank in an order that is drawn; the microbatches of a stage in any order."""
    count = len(stages)
    lists: list[list[Action]] = [[] for _ in range(max(stages) + 1)]
    todo = [Action(0, "F", index) for index in range(microbatches)]
    while todo:
        action = todo.pop(dice.randrange(len(todo)))
        lists[stages[action.stage]].append(action)
        stage, kind, index = action
        if kind == "F":
            todo.append(Action(stage + 1, "F", index) if stage + 1 < count else Action(stage, "B", index))
        elif stage:
            todo.append(Action(stage - 1, "B", index))
    return lists
