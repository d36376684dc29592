"""What each rank runs, takes and sends, and in which order."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from tests.unit.tensorflow.steps import Writer  # noqa: E402
from weft import schedule  # noqa: E402
from weft.errors import PlacementError  # noqa: E402
from weft.schedule.schedule import Action  # noqa: E402
from weft.tensorflow.execution.program import Phase, Program, make_program  # noqa: E402
from weft.tensorflow.split.phases import BEFORE, Phases, place_operations  # noqa: E402
from weft.tensorflow.split.units import make_units  # noqa: E402


def programs(writer, results=None):
    """Two ranks' programs: ``layer0`` is on partition 0, ``layer1`` on partition 1."""
    record = writer.record(results)
    units = make_units(record)
    where = [int(unit.name.removeprefix("layer")) for unit in units.graph]
    phases = place_operations(record, units, 2, where, where, (0, 1))
    order = record.in_order()
    return [make_program(record, phases, rank, units.replicated, order) for rank in range(2)]


def two_layers():
    """A writer, its argument, and the results of its layers."""
    writer = Writer()
    argument = writer.argument()
    first = writer.add(argument, reads=[writer.variable("weight0")], unit="layer0", name="layer0")
    second = writer.add(first, reads=[writer.variable("weight1")], unit="layer1", name="layer1")
    return writer, argument, first, second


def test_a_value_goes_to_a_partition_once():
    writer, argument, first, second = two_layers()
    back = writer.add(second, first, gradient_of=second.operation)
    end = writer.add(back, first, gradient_of=first.operation)
    zero, one = programs(writer)
    handles = [writer.operations[each.operation].inputs[-1].operation for each in (first, second)]
    assert zero.phases == {
        0: Phase(0, [first.operation], [argument.operation, handles[0]], [], [first], [], [(0, first, 1)]),
        3: Phase(3, [end.operation], [], [first, back], [], [(1, back, 1)], []),
    }
    assert one.phases == {
        1: Phase(1, [second.operation], [handles[1]], [first], [second], [(0, first, 0)], []),
        2: Phase(2, [back.operation], [], [first, second], [back], [], [(1, back, 0)]),
    }


def test_what_every_rank_computes_for_itself_is_where_it_is_needed():
    writer, argument, first, second = two_layers()
    mask = writer.add(argument)
    double = writer.add(mask)
    last = writer.add(second, double)
    writer.add(argument)  # nobody takes it
    zero, one = programs(writer)
    assert {mask.operation, double.operation} <= set(one.phases[1].operations)
    assert one.phases[1].operations.index(double.operation) < one.phases[1].operations.index(last.operation)
    assert argument.operation in one.phases[1].feeds
    assert zero.phases[0].operations == [first.operation]


def test_results_are_where_they_are_wanted():
    writer, argument, first, second = two_layers()
    loss = writer.add(second)
    back = writer.add(loss, gradient_of=first.operation)
    double = writer.add(argument)
    none = frozenset()
    zero, one = programs(writer, {loss: none, back: frozenset([0]), argument: none, double: none})
    assert zero.results == [True, True, True, True]
    assert one.results == [True, False, True, True]
    assert zero.phases[3].receives == [(1, loss, 1)]
    assert zero.phases[4].outputs == one.phases[4].outputs == [argument, double]
    assert zero.phases[4].operations == [double.operation]


def test_a_result_that_nobody_else_takes_is_sent_at_the_end():
    writer, _, _, second = two_layers()
    zero, one = programs(writer, {second: frozenset()})
    assert one.phases[1].sends == [(1, second, 0)]
    assert zero.phases[4] == Phase(4, inputs=[second], receives=[(1, second, 1)])


def test_a_result_that_is_no_tensor_is_nowhere():
    writer, *_ = two_layers()
    record = writer.record()
    record.results, record.gradients = [None], [frozenset()]
    units = make_units(record)
    phases = place_operations(record, units, 2, (0, 1), (0, 1), (0, 1))
    assert make_program(record, phases, 0, units.replicated, record.in_order()).results == [False]


def test_what_happens_everywhere_is_in_both_programs():
    writer, _, _, second = two_layers()
    total = writer.variable("total", model=False)
    count = writer.add(second, writes=[total])
    zero, one = programs(writer)
    assert zero.phases[4].operations == one.phases[4].operations == [count.operation]
    assert zero.phases[4].receives == [(1, second, 1)] and one.phases[4].inputs == [second]


def test_a_value_that_cannot_be_sent_does_not_cross():
    writer, _, first, second = two_layers()
    text = writer.add(first, sendable=False, kind="AsString", name="text")
    writer.add(second, sendable=False)
    programs(writer)  # nobody needs them elsewhere
    writer.add(text, reads=[1])
    message = (
        r"text \(AsString\) computes what cannot be sent, a text or a list of tensors, on partition 0, and partition 1 "
        "needs it: make and use it inside of one layer, and do not return it from the step"
    )
    with pytest.raises(PlacementError, match=message):
        programs(writer)


def program(*positions):
    return Program({position: Phase(position) for position in positions}, [])


def in_order(program, text, microbatches, phases):
    return program.order([Action.parse(each) for each in text.split()], microbatches, phases)


def test_the_order_is_that_of_the_schedule():
    actions = schedule.make("1f1b", ranks=2, microbatches=2).ranks[0]
    found = program(0, 3).order(actions, 2, Phases((0, 1), 2))
    assert found == [(0, 0), (0, 1), (3, 0), (3, 1)]


def test_what_comes_first_and_last():
    found = in_order(program(BEFORE, 1, 2, 5, 4), "1F0 1B0 1F1 1B1", 2, Phases((0, 1), 2))
    first = [(BEFORE, 0), (1, 0), (2, 0), (BEFORE, 1), (1, 1), (2, 1)]
    assert found == [*first, (4, 0), (5, 0), (4, 1), (5, 1)]


def test_actions_without_anything_to_do_are_left_out():
    phases = Phases((0, 1), 2)
    assert in_order(program(0), "0F0 0F1 0B0 0B1", 2, phases) == [(0, 0), (0, 1)]
    assert in_order(program(BEFORE, 4), "", 2, phases) == [(BEFORE, 0), (4, 0), (BEFORE, 1), (4, 1)]


def test_microbatches_come_in_order_whatever_a_schedule_says():
    found = in_order(program(BEFORE, 0, 3), "0F1 0F0 0B0 0B1", 2, Phases((0, 1), 2))
    assert found == [(BEFORE, 0), (0, 0), (BEFORE, 1), (0, 1), (3, 0), (3, 1)]


def test_gradients_are_whole():
    found = in_order(program(0, 3), "0F0 0I0 0F1 0W0 0I1 0W1", 2, Phases((0, 1), 2))
    assert found == [(0, 0), (3, 0), (0, 1), (3, 1)]


def test_microbatches_one_after_the_other():
    whole = [(BEFORE, 0), (0, 0), (3, 0), (4, 0), (BEFORE, 1), (0, 1), (3, 1), (4, 1)]
    actions = "0F0 0F1 0B0 0B1"
    each = program(4, 3, 0, BEFORE)
    assert in_order(each, actions, 2, Phases((0, 1), 2, serial="a variable")) == whole
    assert in_order(each, actions, 2, Phases((), 2)) == whole
