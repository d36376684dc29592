"""Random steps, split at random: ranks that run their programs compute what one process computes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("tensorflow")

from tests.unit.tensorflow.pipeline import legal_lists, run_together  # noqa: E402
from tests.unit.tensorflow.steps import drawn, run_alone  # noqa: E402
from weft import schedule  # noqa: E402
from weft.errors import PlacementError  # noqa: E402
from weft.partition.balanced.levels import stages_of_placement  # noqa: E402
from weft.tensorflow.execution.program import make_program  # noqa: E402
from weft.tensorflow.split.phases import EVERYWHERE, NotInOrder, place_operations  # noqa: E402
from weft.tensorflow.split.units import make_units  # noqa: E402


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
        return schedule.make(dice.choice(("interleaved", "simple")), partitions, microbatches).ranks
    for name in ("looped", "looped_bfs"):
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


def check(seed):
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
        return
    programs = [make_program(record, phases, rank, units.replicated, order) for rank in range(partitions)]
    lists = actions(dice, partitions, stages, microbatches)
    orders = [program.order(lists[rank], microbatches, phases) for rank, program in enumerate(programs)]
    ranks = run_together(record, phases, programs, orders)
    values, variables = run_alone(record, microbatches)
    for number, (result, owners) in enumerate(zip(record.results, record.gradients, strict=True)):
        holders = {rank.number for rank in ranks if rank.program.results[number]}
        if result is None:
            assert not holders
            continue
        owner = EVERYWHERE if not owners else phases.owner[next(iter(owners))]
        assert holders >= ({*range(partitions)} if owner == EVERYWHERE else {owner})
        for rank in ranks:
            for index in range(microbatches):
                expected = values[index][result] if rank.number in holders else None
                assert rank.results.get((number, index)) == expected
    for rank in ranks:
        for variable, value in rank.variables.items():
            assert value == variables[variable]
        sent = [(value, target) for phase in rank.program.phases.values() for _, value, target in phase.sends]
        assert len(sent) == len(set(sent))
        assert all(record.operations[value.operation].sendable[value.output] for value, _ in sent)
    for number, home in phases.partition.items():
        for rank in ranks:
            times = {rank.ran[number, index] for index in range(microbatches)}
            assert times == {int(home in (rank.number, EVERYWHERE))}


@pytest.mark.parametrize("block", range(5))
def test_ranks_compute_what_one_process_computes(block):
    for seed in range(100 * block, 100 * block + 100):
        try:
            check(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else print("seed", seed)
            raise
