"""A step's operations as plain records."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from tests.unit.tensorflow.steps import Writer, drawn  # noqa: E402
from weft.tensorflow.trace.operations import Operation, Record, Value  # noqa: E402


def test_users_and_sizes():
    writer = Writer()
    argument = writer.argument()
    one = writer.add(argument, argument, outputs=2)
    other = writer.add(Value(one.operation, 1), argument)
    record = writer.record()
    assert record.users() == [[one.operation, other.operation], [other.operation], []]
    record.operations[one.operation].sizes = (8, 24)
    assert record.size_of(Value(one.operation, 1)) == 24


def test_operations_come_after_what_they_take_and_else_as_they_were_made():
    record = Record(
        [
            Operation("loop", "While", inputs=(Value(3, 0),)),
            Operation("after", "Add", inputs=(Value(0, 0),)),
            Operation("write", "Assign", controls=(4,)),
            Operation("list", "EmptyTensorList"),
            Operation("read", "ReadVariableOp"),
        ]
    )
    assert record.in_order() == [3, 0, 1, 4, 2]


def test_random_steps_are_put_in_order():
    for seed in range(50):
        record = drawn(seed)
        place = {number: at for at, number in enumerate(record.in_order())}
        assert sorted(place) == list(range(len(record.operations)))
        for number, operation in enumerate(record.operations):
            for source in (*(value.operation for value in operation.inputs), *operation.controls):
                assert place[source] < place[number]
