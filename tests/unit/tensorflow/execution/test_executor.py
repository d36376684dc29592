"""An executor goes through a program: what it takes, computes, sends and keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("tensorflow")

from tests.unit.tensorflow.execution.test_random_steps import split  # noqa: E402
from tests.unit.tensorflow.pipeline import own_variables  # noqa: E402
from tests.unit.tensorflow.steps import argument, compute, run_alone  # noqa: E402
from weft.tensorflow.execution.executor import Runnable, run  # noqa: E402
from weft.tensorflow.trace.operations import Value  # noqa: E402


class Way:
    """Computes without TensorFlow. What other ranks send is what one process has computed."""

    def __init__(self, runnable, values, variables):
        self._runnable, self._values, self._variables = runnable, values, variables
        phases = runnable.program.phases.values()
        self._numbers = {
            (number, peer): value
            for phase in phases
            for number, value, peer in (*phase.receives, *phase.sends)
        }
        self.done = []
        self.sent = 0

    def begin(self, trains, tensors):
        self.done.append(("begin", trains, tensors))

    def end(self, results):
        self.done.append(("end",))
        return results

    def exchange(self, sent, tensors, received, specs):
        assert sent or received
        self._check_sent(sent, tensors)
        assert len(specs) == len(received)
        return [self._values[item.microbatch][self._numbers[item.number, item.peer]] for item in received]

    def compute(self, function, inputs, what):
        phase, record = function.phase, self._runnable.record
        kind, microbatch, stage = what
        self.done.append((kind, stage, microbatch))
        taken = [*(Value(number, 0) for number in function.feeds), *phase.inputs]
        inside = dict(zip(taken, inputs, strict=True))
        for number in phase.operations:
            inside |= compute(record, number, inside.__getitem__, self._variables)
        return [inside[value] for value in phase.outputs]

    def _check_sent(self, items, tensors):
        for item, tensor in zip(items, tensors, strict=True):
            assert tensor == self._values[item.microbatch][self._numbers[item.number, item.peer]]
            assert (
                item.name
                == self._runnable.record.operations[self._numbers[item.number, item.peer].operation].name
            )
            self.sent += 1


def runnable_of(made, rank):
    record, program = made.record, made.programs[rank]
    functions = {
        position: SimpleNamespace(
            phase=phase, feeds=[n for n in phase.feeds if record.operations[n].variable < 0]
        )
        for position, phase in program.phases.items()
    }
    specs = {value: None for phase in program.phases.values() for _, value, _ in phase.receives}
    return Runnable(record, program, functions, made.orders[rank], len(made.phases.stages), True, specs)


@pytest.mark.parametrize("fewer", [0, 1])
def test_a_rank_gets_what_it_has_of_the_results(fewer):
    sent = 0
    for seed in range(60):
        made = split(seed)
        if made is None or made.microbatches == fewer:
            continue
        count = made.microbatches - fewer  # of a last mini-batch with few samples
        values, _ = run_alone(made.record, count)
        feeds = [
            {n: argument(n, index) for n, each in enumerate(made.record.operations) if each.feed}
            for index in range(count)
        ]
        for rank, program in enumerate(made.programs):
            runnable = runnable_of(made, rank)
            way = Way(runnable, values, own_variables(made.phases, rank))
            found = run(runnable, feeds, way, ["tensor"])
            assert found == [
                [values[index][result] if has else None for index in range(count)]
                for result, has in zip(made.record.results, program.results, strict=True)
            ]
            assert way.done[0] == ("begin", True, ["tensor"]) and way.done[-1] == ("end",)
            sent += way.sent
    assert sent > 100


def test_what_positions_are_called():
    runnable = Runnable(None, None, {}, [], 2, True, {})
    found = [runnable.describe(position) for position in range(-1, 6)]
    assert found == [("F", -1), ("F", 0), ("F", 1), ("B", 1), ("B", 0), ("F", -1), ("F", -1)]
    without = Runnable(None, None, {}, [], 0, True, {})
    assert [without.describe(position) for position in (-1, 0, 3)] == [("F", -1)] * 3
