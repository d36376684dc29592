"""Which modules become units, and where they go; and what the user's own places give."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import weft.torch as weft
from tests import models
from tests.unit.torch.networks import WIDTH, Block, Chain, Leaking, Normed, Tied, traced
from weft.config import Settings
from weft.errors import PlacementError
from weft.graph import Unit
from weft.simulate import FREE
from weft.torch.split.automatic import place_units
from weft.torch.split.by_hand import place_by_hand
from weft.torch.split.open_modules import Choice, choose, graph_of, turn_choices
from weft.torch.split.partition_models import Plan, PlannedUnit
from weft.torch.split.unit_tree import Tree

TIME = 10e-3


def tree_of(net: nn.Module, **seconds: float) -> Tree:
    """The network's tree, with times that do not depend on the machine: `TIME` a leaf, or those given."""
    found = traced(net)
    for name, record in found.records.items():
        leaf = not list(record.module.children()) and any(True for _ in record.module.parameters())
        record.forward_s = record.backward_s = seconds.get(name.replace(".", "_"), TIME if leaf else 0.0)
    found.around.forward_s = found.around.backward_s = 0.0
    return Tree(net, found)


def choice_of(tree: Tree, partitions: int = 2, **settings: object) -> Choice:
    return choose(tree, Settings(partitions=partitions, **settings))


def where(choice: Choice) -> dict[str, int]:
    return {piece.name: at for piece, at in zip(choice.pieces, choice.partitions, strict=True)}


def test_equal_blocks_stay_whole_and_are_cut_in_the_middle():
    choice = choice_of(tree_of(Chain(4)))
    assert where(choice) == {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}
    assert choice.opened == set(), "opened modules whose units came together are closed again"


def test_a_block_is_opened_where_balance_needs_it():
    choice = choice_of(tree_of(Chain(3)), optimize="speed")
    places = where(choice)
    assert places["blocks.0"] == 0 and places["blocks.2"] == 1
    assert places["blocks.1.up"] == 0 and places["blocks.1.down"] == 1


@pytest.mark.parametrize("speeds", ["1, 0.5", "0.5, 1", "1, 0.25", "3, 2, 1", "1, 3, 1", "2, 2, 2"])
def test_unlike_ranks_get_what_they_can_do(speeds: str):
    """Beside all ways to cut the chain: the slowest rank is as quick as it can be, but for what opening costs."""
    times = [0.01, 0.03, 0.02, 0.01, 0.04, 0.02, 0.01, 0.03, 0.02, 0.01, 0.02, 0.02]
    names = {f"blocks_{at}_{part}": time for at, time in enumerate(times) for part in ("up", "down")}
    tree = tree_of(Chain(12), **names)
    settings = Settings(partitions=len(speeds.split(",")), devices=speeds, memory_weight=0.0)
    fast = [float(part) for part in speeds.split(",")]

    def slowest(loads: Sequence[float]) -> float:
        return max(load / speed for load, speed in zip(loads, fast, strict=True))

    leaves = [time for time in times for _ in ("up", "down")]
    cuts = itertools.combinations(range(1, len(leaves)), len(fast) - 1)
    best = min(
        slowest([sum(leaves[a:b]) for a, b in zip((0, *cut), (*cut, len(leaves)), strict=True)])
        for cut in cuts
    )
    choice = choose(tree, settings)
    loads = [0.0] * len(fast)
    for piece, at in zip(choice.pieces, choice.partitions, strict=True):
        loads[at] += piece.unit.forward_ms / 1e3
    assert slowest(loads) == pytest.approx(best, rel=0.05)
    stages = place_units(tree, settings, FREE, range(len(fast))).stages
    expected = [load * max(fast) / speed for load, speed in zip(loads, fast, strict=True)]
    assert [stage.forward_s for stage in stages] == pytest.approx(expected, rel=0.2), (
        "as long as they take there"
    )


def test_a_loss_that_the_model_computes_counts_for_its_last_unit():
    class Labelled(Chain):
        def forward(self, x):
            scores = super().forward(x)
            return nn.functional.cross_entropy(scores, scores.detach().argmax(1))

    tree = tree_of(Labelled(4))
    of_loss = tree.records[""].share(tree.records["blocks.3.down"].order)
    tree.records[""].forward_s = tree.records[""].backward_s = TIME
    for share in tree.records[""].shares.values():
        share.forward_s = share.backward_s = float(share is of_loss)
    pieces = {piece.name: piece.unit for piece in tree.pieces(set())}
    plain = {piece.name: piece.unit for piece in tree_of(Chain(4)).pieces(set())}
    assert of_loss.saved_bytes > 0
    for name, unit in pieces.items():
        last = name == "blocks.3"
        assert unit.forward_ms - plain[name].forward_ms == pytest.approx(1e3 * TIME * last)
        assert unit.activation_bytes - plain[name].activation_bytes == of_loss.saved_bytes * last


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"pipeline": "1f1b", "microbatches": 2}, 5),
        ({"pipeline": "1f1b", "microbatches": 8}, 4),
        ({"pipeline": "1f1b", "microbatches": 1}, 4),
        ({"pipeline": "1f1b", "microbatches": 2, "optimize": "memory", "memory_weight": 0.0}, 4),
        ({"pipeline": "gpipe", "microbatches": 2}, 4),
    ],
)
def test_the_first_rank_gets_more_where_the_last_one_waits_for_it(settings: dict[str, Any], first: int):
    """Of 8 even parts 5 and 3 take max(5, 3 + 5/m), 4 and 4 take 4 + 4/m: with m = 2 it is 5.5 against 6."""
    known = Settings(**{"partitions": 2, "optimize": "speed", "memory_weight": 0.0, **settings})
    choice = place_units(tree_of(Chain(4)), known, FREE, range(2)).placement
    parts = [0.0, 0.0]
    for piece, at in zip(choice.pieces, choice.partitions, strict=True):
        parts[at] += piece.unit.forward_ms / 1e3
    assert parts == pytest.approx([first * TIME, (8 - first) * TIME], rel=0.02)
    assert choice.opened == ({"blocks.2"} if first == 5 else set())


def test_loads_stay_even_where_a_shared_parameter_sends_microbatches_back():
    tree = tree_of(Tied())
    known = Settings(partitions=2, pipeline="1f1b", microbatches=2, optimize="speed", memory_weight=0.0)
    even = choose(tree, known)
    assert even.stages[0] == even.stages[-1] == 0 and 1 in even.stages
    assert where(choose(tree, known, late=0.5)) != where(even)
    assert where(place_units(tree, known, FREE, range(2)).placement) == where(even)


def test_program_order_counts_not_the_order_of_registration():
    backwards = models.Composed(lambda net, x: net.last(net.first(x)), last=Block(), first=Block())
    assert where(choice_of(tree_of(backwards))) == {"first": 0, "last": 1}


@pytest.mark.parametrize("partitions", [2, 3])
def test_units_that_share_a_parameter_lie_together(partitions: int):
    places = where(choice_of(tree_of(Tied()), partitions))
    assert places["first"] == places["last"]
    assert len(set(places.values())) == partitions


def test_a_module_out_of_which_tensors_leak_is_opened():
    choice = choice_of(tree_of(Leaking()))
    assert "writer" not in where(choice) and "writer.inner" in where(choice)


def test_modules_without_state_float_and_those_with_buffers_only_are_opened():
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table

    net = models.Composed(
        lambda net, x: net.block(net.norm(net.act(x + net.positions(x)))),
        positions=Positions(), act=nn.ReLU(), norm=Normed(), block=Block(),
    )  # fmt: skip
    tree = tree_of(net)
    pieces = {piece.name: piece.floating for piece in tree.pieces({""})}
    assert pieces == {"act": True, "norm": False, "block": False}
    assert tree.always_opened("positions") and not tree.always_opened("norm")
    assert "act" not in where(choice_of(tree))


def test_parameters_used_in_glue_go_with_the_unit_before_them():
    net = models.Composed(
        lambda net, x: net.two(net.one(x)) * net.scale[:WIDTH],
        scale=nn.Parameter(torch.ones(100_000)), one=Block(), two=Block(),
    )  # fmt: skip
    tree = tree_of(net)
    pieces = tree.pieces({""})
    assert [(p.shape, piece.name) for p, piece in tree.glue_parameters(pieces)] == [((100_000,), "two")]
    assert graph_of(pieces).units[1].parameters == graph_of(pieces).units[0].parameters + 100_000


def test_shared_parameters_are_counted_once():
    units = graph_of(tree_of(Tied()).pieces({""})).units
    assert sum(unit.parameters for unit in units) == sum(p.numel() for p in Tied().parameters())


def test_modules_with_backward_hooks_stay_whole():
    net = Chain(2)
    net.blocks[1].register_full_backward_hook(lambda module, before, after: None)
    tree = tree_of(net)
    assert not tree.openable("blocks.1") and tree.openable("blocks.0")


def test_more_partitions_than_units_leave_some_empty():
    choice = choice_of(tree_of(nn.Sequential(nn.Linear(WIDTH, WIDTH))), 3)
    assert len(choice.pieces) == 1


@pytest.mark.parametrize("time_s", [1e-5, 1e-4, 1e-3])
def test_a_model_that_is_quicker_in_one_place_is_divided_all_the_same(time_s: float):
    class Half(nn.Sequential):
        """Every rank follows the operations of an opened module: they cost more than the modules take here."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(60):
                x = x + 0.01
            return super().forward(x)

    shared = nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(Half(shared, Block(), Block()), Half(nn.Linear(WIDTH, WIDTH), Block(), Block()))
    net[1][0].weight = shared.weight  # so the halves lie together, unless they are opened
    choice = choice_of(tree_of(net, **{name.replace(".", "_"): time_s for name, _ in net.named_modules()}))
    assert choice.idle == 0
    assert set(choice.partitions) == {0, 1}


def test_the_same_trace_gives_the_same_choice():
    tree = tree_of(Chain(5))
    assert where(choice_of(tree, 3)) == where(choice_of(tree, 3))


# --- place_by_hand ----------------------------------------------------------------------------------------------


def test_units_are_as_large_as_a_wish_reaches():
    net = Chain(4)
    for index in (2, 3):
        weft.set_partition(net.blocks[index], 1)
    weft.set_partition(net.blocks[1].down, 1)
    _, pieces, places = place_by_hand(tree_of(net), net, 0, 2)
    assert dict(zip([piece.name for piece in pieces], places, strict=True)) == {
        "blocks.0": 0, "blocks.1.up": 0, "blocks.1.down": 1, "blocks.2": 1, "blocks.3": 1,
    }  # fmt: skip


def test_a_model_with_one_wish_for_all_is_one_unit_at_least_below_its_root():
    net = Chain(2)
    _, pieces, places = place_by_hand(tree_of(net), net, 1, 2)
    assert set(places) == {1} and [piece.name for piece in pieces] == ["blocks.0", "blocks.1"]


def test_modules_that_share_a_parameter_apart_are_an_error_that_names_all_three():
    net = Tied()
    weft.set_partition(net.last, 1)
    with pytest.raises(PlacementError) as caught:
        place_by_hand(tree_of(net), net, 0, 2)
    assert str(caught.value) == (
        "first (partition 0) and last (partition 1) share the parameter first.weight: put modules that share a "
        "parameter on the same partition"
    )


def test_what_cannot_be_opened_cannot_be_split():
    net = Chain(2)
    net.blocks[1].register_full_backward_hook(lambda module, before, after: None)
    weft.set_partition(net.blocks[1].down, 1)
    with pytest.raises(PlacementError, match=r"^blocks\.1 cannot be split over partitions: .*as a whole"):
        place_by_hand(tree_of(net), net, 0, 2)


# --- plans -----------------------------------------------------------------------------------------------


def test_a_plan_travels_as_text_and_knows_the_owner_of_every_name():
    net = Tied()
    units = (
        PlannedUnit(Unit("first", 0, 0, 256, 0, parameters=64), 1, cost=0.5),
        *(PlannedUnit(Unit(f"blocks.{n}", 0, 0, 0, 0), n % 2) for n in range(3)),
        PlannedUnit(Unit("last", 0, 0, 0, 0), 1),
    )
    plan = Plan.from_json(Plan(units, {}, {}, True).to_json())
    assert plan == Plan(units, {}, {}, True)
    owners = plan.owners(net)
    assert owners["first.weight"] == owners["last.weight"] == 1
    assert owners["blocks.0.up.bias"] == 0 and owners["blocks.1.up.bias"] == 1
    assert plan.elsewhere(0) == ["first", "blocks.1", "last"]
    text = str(plan.placement(2, 4))
    assert "first" in text and "256" in text


def test_a_plan_of_an_older_checkpoint_is_read():
    """Rows were flat, and had fewer values."""
    row = {"name": "first", "partition": 1, "parameters": 64, "parameter_bytes": 256, "activation_bytes": 8}
    row |= {"forward_ms": 1.5, "backward_ms": 3.0, "cost": 0.5}
    text = json.dumps({"units": [row], "parameters": {}, "buffers": {}, "numpy": False})
    (unit,) = Plan.from_json(text).units
    assert unit == PlannedUnit(Unit("first", 1.5, 3.0, 256, 8, parameters=64), 1, 0.5)
    written = json.loads(Plan.from_json(text).to_json())["units"][0]
    assert {name: written[name] for name in row} == row, "and an older weft reads what this one writes"


# --- a V whose turn is one stage ------------------------------------------------------------------------


def turns_of(tree: Tree, partitions: int = 2) -> list[Choice]:
    layout = [*range(partitions), *range(partitions - 2, -1, -1)]
    return list(turn_choices(tree, Settings(partitions=partitions, optimize="speed"), layout, most=100))


def test_a_turn_has_first_stages_of_all_sizes_and_even_ranks():
    found = turns_of(tree_of(Chain(8)))
    halves = [
        [
            sum(
                piece.unit.forward_ms / 1e3
                for piece, at in zip(one.pieces, one.stages, strict=True)
                if at == stage
            )
            / TIME
            for stage in range(3)
        ]
        for one in found
    ]
    assert halves == [pytest.approx([first, 8, 8 - first], abs=0.5) for first in range(1, 8)]
    for number, choice in enumerate(found, 1):
        assert choice.partitions == [(0, 1, 0)[stage] for stage in choice.stages]
        assert len(choice.opened) == 2 * (number % 2), "only the blocks that are cut are opened"


def test_a_turn_does_not_cut_where_much_more_would_cross(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "weft.torch.split.open_modules.DEARER", 0.0
    )  # in a block the block's input crosses, too
    found = turns_of(tree_of(Chain(8)))
    assert [choice.stages.count(0) for choice in found] == [1, 2, 3]
    assert not any(choice.opened for choice in found)


def test_a_turn_keeps_units_that_share_a_parameter_on_one_rank():
    found = turns_of(tree_of(Tied()))
    assert found
    for choice in found:
        places = where(choice)
        assert places["first"] == places["last"]
        assert set(choice.stages) == {0, 1, 2}, (
            "the second of them is no visit more: it lies in the last stage"
        )
