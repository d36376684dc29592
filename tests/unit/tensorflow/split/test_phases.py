"""When and where the operations of a step run."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from tests.unit.tensorflow.steps import Writer  # noqa: E402
from weft.errors import PlacementError  # noqa: E402
from weft.tensorflow.split.phases import (  # noqa: E402
    BEFORE,
    EVERYWHERE,
    NotInOrder,
    Phases,
    place_operations,
)
from weft.tensorflow.split.units import make_units  # noqa: E402

STAGES = (0, 1, 0)
"""Partition 0 has the first and the last stage."""


class Step(Writer):
    """A model of one layer for each of these stages, each with a variable of its own."""

    def __init__(self, stages=STAGES):
        super().__init__()
        self.stages = stages
        self.weights = [self.variable(f"weight{stage}") for stage in range(len(stages))]
        self.layers = []
        value = self.input = self.argument()
        for stage, weight in enumerate(self.weights):
            value = self.add(value, reads=[weight], unit=f"layer{stage}", name=f"layer{stage}")
            self.layers.append(value)

    def place(self, results=None, stages=None, known=None):
        record = self.record(results)
        units = make_units(record)
        numbers = [int(unit.name.removeprefix("layer")) for unit in units.graph]
        where = [self.stages[number] for number in numbers]
        stages = self.stages if stages is None else stages
        return place_operations(record, units, max(self.stages) + 1, numbers, where, stages, known)


def test_positions_belong_to_the_partitions_of_their_stages():
    phases = Phases((0, 1, 0), 3)
    assert [phases.at(position) for position in range(-1, 7)] == [-1, 0, 1, 0, 0, 1, 0, -1]
    assert phases.end == 6


def test_the_first_position_of_a_partition():
    phases = Phases((0, 1, 0), 3)
    assert [phases.first(1, least) for least in range(-1, 8)] == [1, 1, 1, 4, 4, 4, 6, 6, 7]
    assert [phases.first(0, least) for least in (0, 1, 4, 6)] == [0, 2, 5, 6]
    assert phases.first(2, 0) == 6  # it has no stage


def test_without_stages_every_position_is_everyones():
    phases = Phases((), 2)
    assert (phases.end, phases.at(0), phases.first(1, 0), phases.first(1, 3)) == (0, EVERYWHERE, 0, 3)


def test_forward_then_backward():
    step = Step()
    loss = step.add(step.layers[2])
    back = [loss]
    for layer in reversed(step.layers):
        back.append(step.add(back[-1], layer, gradient_of=layer.operation))
    phases = step.place()
    places = [(phases.partition[value.operation], phases.position[value.operation]) for value in step.layers]
    assert places == [(0, 0), (1, 1), (0, 2)]
    assert (phases.partition[loss.operation], phases.position[loss.operation]) == (0, 2)
    places = [(phases.partition[value.operation], phases.position[value.operation]) for value in back[1:]]
    assert places == [(0, 3), (1, 4), (0, 5)]
    assert phases.serial == ""
    assert step.input.operation not in phases.partition  # everyone has it


def test_glue_is_where_its_last_input_is_made():
    step = Step()
    residual = step.add(step.layers[1], step.layers[0])
    late = step.add(step.layers[2], residual)
    phases = step.place()
    assert (phases.partition[residual.operation], phases.position[residual.operation]) == (1, 1)
    assert (phases.partition[late.operation], phases.position[late.operation]) == (0, 2)


def test_glue_that_takes_a_variable_is_where_the_variable_is():
    step = Step()
    decay = step.add(reads=[step.weights[1]])
    phases = step.place()
    assert (phases.partition[decay.operation], phases.position[decay.operation]) == (1, 1)
    assert [phases.owner[weight] for weight in step.weights] == [0, 1, 0]


def test_a_model_variable_that_no_unit_uses_is_on_the_first_partition_or_where_it_was_before():
    step = Step()
    unused = step.variable("unused")
    norm = step.add(reads=[unused])
    assert step.place().owner[unused] == 0
    phases = step.place(known={unused: 1})
    assert phases.owner[unused] == 1 == phases.partition[norm.operation]


def test_an_operation_that_uses_variables_of_two_partitions_is_refused():
    step = Step()
    others = [step.variable("one"), step.variable("other")]
    step.add(reads=others)
    assert step.place(known={others[0]: 1}).owner[others[1]] == 1
    message = (
        r"one operation of the step uses one \(partition 0\) and other \(partition 1\) at once, and an earlier step "
        "has put these on different partitions: call first the step that uses them together"
    )
    with pytest.raises(PlacementError, match=message):
        step.place(known={others[0]: 0, others[1]: 1})


def test_effects_on_other_variables_happen_everywhere():
    step = Step()
    counter, total = step.variable("counter", model=False), step.variable("total", model=False)
    count = step.add(writes=[counter])
    late = step.add(step.layers[2], writes=[total])
    phases = step.place()
    assert (phases.partition[count.operation], phases.position[count.operation]) == (EVERYWHERE, BEFORE)
    assert (phases.partition[late.operation], phases.position[late.operation]) == (EVERYWHERE, phases.end)
    assert phases.owner[counter] == phases.owner[total] == EVERYWHERE
    assert phases.serial == ""


def test_what_happened_everywhere_is_there_at_once():
    step = Step()
    counter = step.variable("counter", model=False)
    late = step.add(step.layers[2], writes=[counter])
    shown = step.add(late)
    phases = step.place()
    assert phases.position[late.operation] == phases.position[shown.operation] == phases.end


def test_effects_keep_their_order():
    step = Step()
    totals = [step.variable(name, model=False) for name in ("one", "other")]
    first = step.add(step.layers[2], writes=totals[:1])
    second = step.add(first, writes=totals[1:])  # not before all else, though all that it takes is everywhere
    third = step.add(writes=totals[1:])
    change = step.add(step.layers[2], writes=[step.weights[1]])
    after = step.add(reads=[step.weights[1]])
    phases = step.place()
    assert {phases.position[each.operation] for each in (first, second, third)} == {phases.end}
    assert phases.position[after.operation] == phases.position[change.operation] == 4


def test_microbatches_wait_where_a_layer_takes_a_variable_of_no_model_that_is_written_at_the_end():
    step = Step()
    counter = step.variable("counter", model=False)
    read = step.add(reads=[counter])
    step.add(step.layers[0], read, reads=[step.weights[1]], unit="layer1")
    step.add(step.layers[2], writes=[counter])
    assert step.place().serial == "counter is written and read at different times of a microbatch"


@pytest.mark.parametrize("sendable", [True, False])
def test_what_a_metric_adds_to_is_read_when_it_is_written(sendable):
    step = Step()
    total = step.variable("total", model=False)
    read, value = step.add(reads=[total]), step.add(step.layers[0], sendable=sendable)
    added = step.add(read, value)
    wrote = step.add(added, writes=[total])
    phases = step.place()
    moved = {
        (phases.partition[each.operation], phases.position[each.operation]) for each in (read, added, wrote)
    }
    assert (moved == {(EVERYWHERE, phases.end)}) == (phases.serial == "") == sendable
    assert (phases.partition[value.operation], phases.position[value.operation]) == (0, 0)


def test_microbatches_wait_where_a_variable_of_a_model_is():
    step = Step()
    step.add(step.layers[2], writes=[step.weights[1]])
    assert step.place().serial == "weight1 is written and read at different times of a microbatch"


def test_microbatches_overlap_where_each_variable_is_written_in_one_phase():
    step = Step()
    mean = step.variable("mean")
    step.add(step.layers[1], writes=[mean], unit="layer1")
    step.add(step.layers[2], reads=[step.weights[1]])  # only read, at another time
    assert step.place().serial == ""


def test_a_value_that_cannot_be_sent_keeps_what_takes_it():
    step = Step()
    text = step.add(step.layers[1], sendable=False)
    shown = step.add(text, step.layers[2])
    phases = step.place()
    assert (phases.partition[shown.operation], phases.position[shown.operation]) == (1, 4)


def test_gradients_are_with_their_operations_and_after_them():
    step = Step()
    loss = step.add(step.layers[2])
    zero = step.add(step.layers[0], gradient_of=step.layers[1].operation)
    back = step.add(zero, gradient_of=loss.operation)
    phases = step.place()
    assert (phases.partition[zero.operation], phases.position[zero.operation]) == (
        1,
        4,
    )  # not in the forward pass
    assert (phases.partition[back.operation], phases.position[back.operation]) == (0, 5)


def test_results_that_are_gradients_go_to_the_owner_and_all_others_everywhere():
    step = Step()
    loss = step.add(step.layers[2])
    gradient = step.add(loss, gradient_of=step.layers[1].operation)
    results = {loss: frozenset(), gradient: frozenset([step.weights[1]])}
    assert step.place(results).wanted == [EVERYWHERE, 1]


def test_a_second_pass_with_gradients_is_not_in_order():
    step = Step()
    back = step.add(step.layers[2], gradient_of=step.layers[2].operation)
    moved = step.add(back)
    again = step.add(moved, unit="layer0", name="again")
    with pytest.raises(NotInOrder, match="again"):
        step.place()
    phases = step.place(stages=())
    steps = [*step.layers, back, moved, again]
    assert [phases.position[value.operation] for value in steps] == [0, 1, 2, 2, 2, 2]
    assert phases.end == 0
