"""Which operations become one unit, what a unit costs, and which units must lie together."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from tests.unit.tensorflow.steps import Writer  # noqa: E402
from weft.graph import Tensor  # noqa: E402
from weft.tensorflow.split.units import find_replicated, make_units, variable_sets  # noqa: E402
from weft.tensorflow.trace.operations import Value  # noqa: E402


def names(writer):
    """The operations of each unit, by the unit's name."""
    units = make_units(writer.record())
    return {
        unit.name: [writer.operations[number].name for number in members]
        for unit, members in zip(units.graph, units.members, strict=True)
    }


def placed(writer):
    """A value that is not the same on all ranks before it is sent."""
    return writer.add(writer.argument(), unit="start", stateful=True, name="start")


def test_what_follows_from_arguments_alone_is_replicated():
    writer = Writer()
    weight = writer.variable("weight")
    argument = writer.argument()
    mask = writer.add(argument, unit="layer")
    double = writer.add(mask)
    read = writer.add(reads=[weight], unit="layer")
    product = writer.add(mask, read, unit="layer")
    drawn = writer.add(argument, stateful=True)
    by_hand = writer.add(argument, partition=1)
    record = writer.record()
    handle = writer.operations.index(next(each for each in writer.operations if each.variable == weight))
    found = find_replicated(record, record.in_order())
    assert found == {argument.operation, mask.operation, double.operation, handle}
    assert not found & {read.operation, product.operation, drawn.operation, by_hand.operation}


def test_a_variable_is_there_for_all_but_not_what_is_computed_with_it():
    writer = Writer()
    weight = writer.variable("weight")
    first = writer.add(reads=[weight])
    shape = writer.add(writer.operations[first.operation].inputs[0])  # of the handle
    record = writer.record()
    assert shape.operation not in find_replicated(record, record.in_order())


def test_one_call_of_a_layer_is_one_unit():
    writer = Writer()
    value = placed(writer)
    for label in ("dense", "dense", "dense#2", "dense#2"):
        value = writer.add(value, unit=label)
    assert [len(members) for members in names(writer).values()] == [1, 2, 2]
    assert list(names(writer)) == ["start", "dense", "dense#2"]


def test_what_a_model_does_between_its_layers_is_a_unit_for_each_operation():
    writer = Writer()
    value = placed(writer)
    one = writer.add(value, unit="block*", name="add")
    writer.add(one, unit="block*", name="scale")
    assert names(writer) == {"start": ["start"], "add": ["add"], "scale": ["scale"]}


def test_names_are_unique():
    writer = Writer()
    value = placed(writer)
    value = writer.add(value, unit="model*", name="add")  # an operation with the name of a layer
    value = writer.add(value, unit="add", name="add/sum")
    value = writer.add(value, unit="add#2", name="add/sum_1")  # this layer's second call
    writer.add(value, unit="model*", name="add")
    assert list(names(writer)) == ["start", "add", "add#2", "add#2#2", "add#3"]


def test_operations_beside_each_other_are_one_unit():
    writer = Writer()
    value = placed(writer)
    one = writer.add(value, unit="one")
    writer.add(one, unit="other", beside=(one.operation,), name="other")
    assert list(names(writer)) == ["start", "one"]


def test_values_that_cannot_be_sent_stay_in_a_unit():
    writer = Writer()
    value = placed(writer)
    states = writer.add(value, unit="loop", sendable=False)
    between = writer.add(states, unit="model*")
    writer.add(between, unit="stack")
    assert list(names(writer)) == ["start", "loop", "stack"]


def test_all_that_touches_a_written_variable_is_one_unit():
    writer = Writer()
    mean, scale = writer.variable("mean"), writer.variable("scale")
    value = placed(writer)
    one = writer.add(value, reads=[scale], unit="norm", name="norm")
    two = writer.add(one, writes=[mean], unit="norm")
    other = writer.add(two, reads=[mean], unit="other", name="other")
    last = writer.add(other, reads=[scale], unit="last", name="last")
    writer.add(last, unit="end", name="end")
    units = make_units(writer.record())
    assert [unit.name for unit in units.graph] == ["start", "norm", "last", "end"]
    groups = [unit.group for unit in units.graph]
    assert groups[1] == groups[2] and groups[1] is not None  # they only read the scale
    assert groups[0] is groups[3] is None


def test_units_that_wait_for_each_other_are_one():
    writer = Writer()
    value = placed(writer)
    first = writer.add(value, unit="outer")
    inner = writer.add(first, unit="inner")
    outside = writer.add(inner)  # of no model; the circle goes through it
    writer.add(outside, first, unit="outer")
    writer.add(inner, unit="after", name="after")
    assert [len(each) for each in names(writer).values()] == [1, 3, 1]


def test_the_order_of_effects_on_a_variable_is_an_order_of_units():
    writer = Writer()
    weight = writer.variable("weight")
    start = placed(writer)
    late = writer.add(start, reads=[weight], unit="late", name="late")
    early = writer.add(start, reads=[weight], unit="early", name="early")
    record = writer.record()
    assert [unit.name for unit in make_units(record).graph] == ["start", "late", "early"]
    record.operations[late.operation].controls = (early.operation,)
    assert [unit.name for unit in make_units(record).graph] == ["start", "early", "late"]


def test_a_loop_takes_what_its_gradient_makes_it_remember():
    writer = Writer()
    value = placed(writer)
    loop = writer.add(value, unit="loop", name="loop")
    loss = writer.add(loop)
    shape = writer.add(value, gradient_of=loop.operation, name="shape")
    states = writer.add(shape, gradient_of=loop.operation, sendable=False, name="states")
    writer.operations[loop.operation].inputs += (states,)
    back = writer.add(loss, gradient_of=loop.operation, name="back")
    units = make_units(writer.record())
    assert [unit.name for unit in units.graph] == ["start"]  # the shape is that of a value of it
    assert shape.operation in units.unit_of and states.operation in units.unit_of
    assert back.operation not in units.unit_of


def test_units_of_variables_that_one_operation_uses_at_once_are_a_group():
    writer = Writer()
    one, other, third = (writer.variable(name) for name in ("one", "other", "third"))
    value = placed(writer)
    for number, variable in enumerate((one, other, third)):
        value = writer.add(value, reads=[variable], unit=f"layer{number}")
    apart = make_units(writer.record())
    assert {unit.group for unit in apart.graph} == {None}
    writer.add(value, reads=[one, other])
    units = make_units(writer.record())
    start, first, second, last = (unit.group for unit in units.graph)
    assert start is last is None and first == second is not None
    assert units.owners == {one: [1, 2], other: [2, 1], third: [3]}
    assert units.count_variables() == [0, 1, 1, 1]
    assert variable_sets(writer.record()) == [[one, other], [third]]


def test_costs_and_tensors():
    writer = Writer()
    weight, shared = writer.variable("weight"), writer.variable("shared")
    start = placed(writer)
    one = writer.add(start, reads=[weight, shared], unit="one", work_s=2e-3, outputs=2)
    other = writer.add(start, Value(one.operation, 1), reads=[shared], unit="other", work_s=1e-3)
    loss = writer.add(other, one, work_s=6e-3)
    writer.add(loss, gradient_of=loss.operation, work_s=5e-3)
    back = writer.add(loss, other, gradient_of=other.operation, work_s=3e-3)
    writer.add(back, one, Value(one.operation, 1), gradient_of=one.operation, work_s=4e-3)
    units = make_units(writer.record())
    _, first, second = units.graph
    assert (first.forward_ms, first.backward_ms) == (2.0, 4.0)
    assert (second.forward_ms, second.backward_ms) == (7.0, 8.0)  # with what the step does outside of units
    assert (first.parameter_bytes, first.parameters) == (80, 20)
    assert (second.parameter_bytes, second.parameters) == (0, 0)  # the shared one counts in the first
    assert (first.activation_bytes, second.activation_bytes) == (16, 8)
    assert (first.output_bytes, second.output_bytes) == (8, 0)
    assert units.graph.tensors == (Tensor("start", ("one", "other"), 8), Tensor("one", ("other",), 8))


def test_a_unit_goes_where_most_of_its_operations_are_wanted():
    writer = Writer()
    value = placed(writer)
    for partition in (2, 1, 2):
        value = writer.add(value, unit="layer", partition=partition)
    writer.add(value, unit="next")
    assert make_units(writer.record()).by_hand == {1: 2}
