"""Random steps, split at random: ranks that run their programs compute what one process computes."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

pytest.importorskip("tensorflow")

from tests.unit.tensorflow.pipeline import legal_lists, run_together  # noqa: E402
from tests.unit.tensorflow.steps import drawn, run_alone  # noqa: E402
from weft import schedule  # noqa: E402
from weft.errors import PlacementError  # noqa: E402
from weft.partition.balanced.levels import stages_of_placement  # noqa: E402
from weft.tensorflow.execution.program import Program, make_program  # noqa: E402
from weft.tensorflow.split.phases import EVERYWHERE, NotInOrder, Phases, place_operations  # noqa: E402
from weft.tensorflow.split.units import make_units  # noqa: E402
from weft.tensorflow.trace.operations import Record  # noqa: E402


def placement(dice, graph, partitions):
    """A partition for each unit: contiguous runs or any; the units of a group together."""
    count = len(graph)
    if dice.random() < 0.5:
        cuts = sorted(dice.randint(0, count) for _ in range(partitions - 1))
        where = [sum(unit >= cut for cut in cuts) for unit in range(count)]
    else:
        where = [dice.randrange(partitions) for _ in range(count)]
    for members in graph.groups.values():
        for unit in members:
            where[unit] = where[members[0]]
    return where


def actions(dice, partitions, stages, microbatches):
    """The lists of a schedule for these stages."""
    if stages == tuple(range(partitions)) and dice.random() < 0.7:
        return schedule.make(dice.choice(("1f1b", "gpipe")), partitions, microbatches).ranks
    for name in ("interleaved_1f1b", "looped_bfs"):
        made = schedule.make(name, partitions, microbatches)
        if made.rank_of_stage == stages and dice.random() < 0.7:
            return made.ranks
    return legal_lists(dice, stages, microbatches)


def place(record, units, partitions, where):
    """The phases, as a step gets them; without stages where it does not go forward and then backward."""
    stage_of_unit, stages = stages_of_placement(units.graph, where, partitions)
    try:
        return place_operations(record, units, partitions, stage_of_unit, where, stages), stages
    except NotInOrder:
        return place_operations(record, units, partitions, stage_of_unit, where, ()), stages


def crosses(record, phases, partitions):
    """Whether a value that cannot be sent is needed where it is not made."""
    everyone = {*range(partitions)}
    needs = [
        (value, home)
        for number, home in phases.partition.items()
        for value in record.operations[number].inputs
    ]
    return any(
        ({home} if home != EVERYWHERE else everyone) - {phases.partition[value.operation]}
        for value, home in needs
        if not record.operations[value.operation].sendable[value.output]
        and phases.partition.get(value.operation, EVERYWHERE) != EVERYWHERE
    )


class Split(NamedTuple):
    """A step that was split: what each of the ranks runs."""

    record: Record
    microbatches: int
    phases: Phases
    programs: list[Program]
    orders: list[list[tuple[int, int]]]


def split(seed):
    """The random step with this number, split at random; None where it is refused, and should be."""
    dice = random.Random(seed)
    record = drawn(seed)
    partitions, microbatches = dice.randint(1, 4), dice.randint(1, 5)
    units = make_units(record)
    where = placement(dice, units.graph, partitions)
    phases, stages = place(record, units, partitions, where)
    order = record.in_order()
    if crosses(record, phases, partitions):
        with pytest.raises(PlacementError, match="computes what cannot be sent"):
            make_program(record, phases, 0, units.replicated, order)
        return None
    programs = [make_program(record, phases, rank, units.replicated, order) for rank in range(partitions)]
    lists = actions(dice, partitions, stages, microbatches)
    orders = [program.order(lists[rank], microbatches, phases) for rank, program in enumerate(programs)]
    return Split(record, microbatches, phases, programs, orders)


def check(seed):
    made = split(seed)
    if made is not None:
        ranks = run_together(made.record, made.phases, made.programs, made.orders)
        values, variables = run_alone(made.record, made.microbatches)
        check_results(made, ranks, values)
        check_variables(ranks, variables)
        check_messages(made)
        check_counts(made, ranks)


def check_results(made, ranks, values):
    """Whoever has a result has the right one; gradients are with their variables, all else everywhere."""
    everyone = {*range(len(ranks))}
    for number, (result, owners) in enumerate(zip(made.record.results, made.record.gradients, strict=True)):
        holders = {rank.number for rank in ranks if rank.program.results[number]}
        if result is None:
            assert not holders
            continue
        owner = EVERYWHERE if not owners else made.phases.owner[next(iter(owners))]
        assert holders >= (everyone if owner == EVERYWHERE else {owner})
        for rank in ranks:
            for index in range(made.microbatches):
                expected = values[index][result] if rank.number in holders else None
                assert rank.results.get((number, index)) == expected


def check_variables(ranks, variables):
    """In the end each rank has the right values of its variables; every variable has a rank."""
    for rank in ranks:
        for variable, value in rank.variables.items():
            assert value == variables[variable]
    assert {variable for rank in ranks for variable in rank.variables} == set(variables)


def check_messages(made):
    """A value goes to a partition once."""
    for program in made.programs:
        sent = [(value, target) for phase in program.phases.values() for _, value, target in phase.sends]
        assert len(sent) == len(set(sent))


def check_counts(made, ranks):
    """An operation with effects runs once a microbatch: on its partition, or on each."""
    for number, home in made.phases.partition.items():
        for rank in ranks:
            times = {rank.ran[number, index] for index in range(made.microbatches)}
            assert times == {int(home in (rank.number, EVERYWHERE))}


@pytest.mark.parametrize("block", range(5))
def test_ranks_compute_what_one_process_computes(block):
    for seed in range(100 * block, 100 * block + 100):
        try:
            check(seed)
        except BaseException:
            print(f"the step drawn with the seed {seed}")
            raise
