"""What `auto` chooses for a traced network whose times are given, and what follows from the choice."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.unit.torch.networks import Chain
from tests.unit.torch.split.test_open_modules import tree_of
from weft.config import Settings
from weft.errors import PlacementError
from weft.plan.chosen import Chosen, layout, schedule_for
from weft.schedule.legal import check
from weft.simulate import FREE
from weft.torch.split import automatic
from weft.torch.split.automatic import choose_automatically, expected_step, place_units
from weft.torch.split.link_speed import MeasuredLink
from weft.torch.split.open_modules import Choice
from weft.torch.split.unit_tree import Tree

FEW = Settings(partitions=2, microbatches=4, pipeline="auto", memory_weight=0.0)


def split_tree(blocks: int) -> Tree:
    """A chain of equal blocks whose backward passes are half I and half W."""
    tree = tree_of(Chain(blocks))
    for record in tree.records.values():
        record.input_s = record.weight_s = record.backward_s / 2
    return tree


@pytest.fixture(scope="module")
def found() -> tuple[Chosen, Choice]:
    return choose_automatically(split_tree(16), FEW, MeasuredLink(), None)


def test_few_microbatches_take_a_v_with_a_small_first_stage(found: tuple[Chosen, Choice]):
    chosen, choice = found
    assert str(chosen.option) == "list on v, I and W"
    assert chosen.schedule.rank_of_stage == (0, 1, 0)
    loads = [0.0, 0.0, 0.0]
    for piece, stage in zip(choice.pieces, choice.stages, strict=True):
        loads[stage] += piece.unit.time_ms
    assert loads[0] + loads[2] == pytest.approx(loads[1], rel=0.05) and loads[0] < loads[2]
    assert str(Chosen.from_json(chosen.to_json()).option) == str(chosen.option)


def test_the_choice_serves_steps_of_other_sizes(found: tuple[Chosen, Choice]):
    chosen, _ = found
    for microbatches in (1, 3, 7):
        made = schedule_for(FEW, chosen, microbatches)
        check(made)
        assert made.microbatches == microbatches and made.rank_of_stage == (0, 1, 0)
    assert schedule_for(FEW, chosen, 4) is chosen.schedule


@pytest.mark.parametrize("pipeline", ["auto", "list"])
def test_where_nothing_fits_the_memory_the_best_runs_and_why_is_told(
    pipeline: str, caplog: pytest.LogCaptureFixture
):
    settings = dataclasses.replace(FEW, pipeline=pipeline)
    chosen, choice = choose_automatically(split_tree(4), settings, MeasuredLink(), memory_bytes=100.0)
    check(chosen.schedule)
    assert set(choice.partitions) == {0, 1}
    (told,) = caplog.messages
    assert re.match(r"no schedule fits the memory \(rank 0 needs \S+ KiB, it has 100 B\): ", told), told
    assert f"): {chosen.option} runs, which may take more" in told


def test_what_is_offloaded_needs_no_room_on_the_device():
    tree = split_tree(16)
    for record in tree.records.values():
        record.saved_bytes *= 100  # activations count more than parameters do
    settings = dataclasses.replace(FEW, pipeline="gpipe")

    def needed(settings: Settings) -> int:
        choice = choose_automatically(tree, settings, MeasuredLink(), None)[1]
        return max(expected_step(settings, choice, None).peak_bytes)

    plain = needed(settings)
    for name in ("offload_activations", "offload_optimizer"):
        assert needed(dataclasses.replace(settings, **{name: True})) < plain
    limit = needed(dataclasses.replace(settings, offload_activations=True)) * 1.05
    offloads = dataclasses.replace(FEW, offload_activations=True)
    best, slower = (choose_automatically(tree, s, MeasuredLink(), limit)[0] for s in (offloads, FEW))
    assert best.step_s < slower.step_s
    assert str(best.option) == str(choose_automatically(tree, FEW, MeasuredLink(), None)[0].option)


def test_units_that_no_schedule_can_place_are_told(monkeypatch: pytest.MonkeyPatch):
    def nowhere(*_: object) -> None:
        raise PlacementError("there are no units")

    monkeypatch.setattr(automatic, "place_units", nowhere)
    with pytest.raises(PlacementError, match="no schedule can run: there are no units"):
        choose_automatically(split_tree(4), FEW, MeasuredLink(), None)


def test_another_model_of_the_step_is_even_on_the_same_ranks(found: tuple[Chosen, Choice]):
    chosen, _ = found
    other = place_units(split_tree(8), FEW, chosen.links, layout(FEW, chosen)).placement
    assert set(other.stages) == {0, 1, 2}
    assert sum(cost for cost, at in zip(other.costs, other.partitions, strict=True) if at) == pytest.approx(
        0.5, abs=0.05
    )
    alone = place_units(split_tree(8), FEW, FREE, (0, 1)).placement
    assert set(alone.stages) == {0, 1}
