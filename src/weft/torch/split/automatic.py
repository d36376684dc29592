"""`auto`: the schedule and the split that take the least simulated step, from what the trace has measured.

After some steps the prediction is compared with what they took. Then the search runs once more, with the times of
the real stages, over the schedules that the present placement can run, and a better one takes over. `expected_step`
simulates the step of any placement.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from weft import schedule
from weft.config import Settings
from weft.errors import ConfigError, FormatError, PlacementError
from weft.plan.chosen import Chosen, ahead, execution, options_for, schedule_for
from weft.plan.explain import explain
from weft.plan.fill_drain_skew import PARTS
from weft.plan.measured.corrected import find_better, measure_stages
from weft.plan.measured.planned import Planned
from weft.plan.option import Option, Placed
from weft.plan.search import Found, recomputed, search
from weft.plan.v_apex import EFFORT, best_turn, tries
from weft.schedule.legal import check
from weft.schedule.table import KINDS
from weft.session.recording import record_plan
from weft.simulate import Links, Simulation, StageCost, as_weft_runs
from weft.topology.cluster import Link
from weft.torch.session.collectives import agree_on, gather_texts
from weft.torch.session.device import limit_bytes
from weft.torch.session.session import Session
from weft.torch.split.link_speed import MeasuredLink
from weft.torch.split.open_modules import (
    BYTES_PER_S,
    CALL_S,
    CROSSING_S,
    MICROBATCH_S,
    Choice,
    choose,
    turn_choices,
)
from weft.torch.split.unit_tree import Tree
from weft.torch.tensors.pytree import bytes_of
from weft.untrusted import read_text

log = logging.getLogger("weft")

TURN = Option("list", like="v")
MEMORY_WEIGHT = 0.8
"""Of a split that must fit a memory limit."""
STEPS = 20
"""After so many steps the prediction is compared with them."""


def choose_automatically(
    tree: Tree, settings: Settings, link: MeasuredLink, memory_bytes: float | None
) -> tuple[Chosen, Choice]:
    """The best schedule, and the placement on its stages. If no schedule fits the memory, the best of all.

    ``link``: what messages between the first two ranks take; ``memory_bytes``: what a rank has, if that is limited.

    Raises:
        PlacementError: If the units cannot be placed on the stages of any schedule.
    """
    links = links_of(tree, link)
    if settings.pipeline == "file":
        return _from_file(settings, functools.partial(place_units, tree, settings, links), links)
    found, fault = _find(tree, settings, links, memory_bytes)
    best = _first(found)
    if fault:
        log.warning("no schedule fits the memory (%s): %s runs, which may take more", fault, best.option)
    assert best.placed is not None
    return Chosen.of(best, links, explain(found)), best.placed.placement


def find_best(tree: Tree, settings: Settings, links: Links, memory_bytes: float | None) -> Found:
    """The best schedule with the placement on its stages; the best of all, if none fits the memory.

    Raises:
        PlacementError: If the units cannot be placed on the stages of any schedule.
    """
    return _first(_find(tree, settings, links, memory_bytes)[0])


def _find(
    tree: Tree, settings: Settings, links: Links, memory_bytes: float | None
) -> tuple[list[Found], str]:
    """All that was tried, the best first, and why none fits the memory, if none does."""
    place = functools.partial(place_units, tree, settings, links)
    by_memory = dataclasses.replace(settings, memory_weight=MEMORY_WEIGHT)
    limits = None if memory_bytes is None else [int(memory_bytes)] * settings.partitions
    look = functools.partial(
        search,
        settings.partitions,
        settings.microbatch_count,
        place,
        links,
        tried=options_for(settings, limits is not None),
        within=lambda option: place_units(tree, by_memory, links, option.layout(settings.partitions)),
        **execution(settings, revisits=True),
    )
    found = look(memory_bytes=limits)
    fault = found[0].fault
    if all(one.schedule is None for one in found):  # "list" makes none that it cannot run
        found = look()
    return found, fault


def _first(found: Sequence[Found]) -> Found:
    """The first that can run."""
    best = next((one for one in found if one.schedule is not None), None)
    if best is None or best.placed is None:
        raise PlacementError(f"no schedule can run: {found[0].fault}")
    return best


def _from_file(
    settings: Settings, place: Callable[[Sequence[int]], Placed], links: Links
) -> tuple[Chosen, Choice]:
    """The schedule that the user wrote, and the placement on its stages."""
    try:
        text = read_text(settings.schedule_file)
    except FormatError as error:
        raise ConfigError(
            f"schedule_file: {error}: write the path of a CSV file that the first rank can read"
        ) from error
    made = schedule.make("file", settings.partitions, settings.microbatch_count, text=text)
    check(made)
    placed = place(made.rank_of_stage)
    step = as_weft_runs(made, placed.stages, links, **execution(settings, placed.revisits))
    found = Found(Option("file"), placed, made, step.step_s, step.bubble, step.peak_bytes)
    return Chosen.of(found, links, explain([found])), placed.placement


def links_of(tree: Tree, link: MeasuredLink) -> Links:
    """The measured link between all ranks, for tensors as they flow between this model's units."""
    sizes = [piece.unit.output_bytes for piece in tree.pieces(set()) if not piece.floating]
    return link.links(median(sizes) if sizes else 0.0)


def place_units(tree: Tree, settings: Settings, links: Links, layout: Sequence[int]) -> Placed:
    """The units on stages. ``layout``: the rank of each stage."""
    ranks = settings.partitions
    if KINDS[settings.pipeline].chunks == (1, 1) and ahead(settings) and settings.microbatch_count > 1:
        return _place_shifted(tree, settings, links, layout)
    if ranks == 1 or settings.speeds or tuple(layout) != TURN.layout(ranks):
        return as_placed(choose(tree, settings, layout), layout, settings.speeds)
    few = tries(ranks, settings.microbatch_count)
    found = [
        as_placed(choice, layout, settings.speeds) for choice in turn_choices(tree, settings, layout, few)
    ]
    halves = any(piece.unit.input_ms is not None for one in found for piece in one.placement.pieces)
    return best_turn(found, ranks, settings.microbatch_count, links, halves)


def _place_shifted(tree: Tree, settings: Settings, links: Links, layout: Sequence[int]) -> Placed:
    """The units on one stage a rank: the first stages may be larger than the last, so that the step is the shortest.

    The step is simulated, and what crosses counts, too. Loads are even where simulating all placements is more than
    `EFFORT`. They are even as well where units that share a parameter send microbatches back: then the last rank does
    not end first.
    """
    made = schedule_for(settings, None, settings.microbatch_count)
    most = (1.0 - settings.memory_weight) / settings.microbatch_count
    even = as_placed(choose(tree, settings, layout), layout, settings.speeds)
    if settings.speeds or even.revisits or (1 + len(PARTS)) * sum(map(len, made.ranks)) > EFFORT:
        return even

    def step_s(one: Placed) -> float:
        step = as_weft_runs(made, one.stages, links, **execution(settings, one.revisits))
        return step.step_s + settings.microbatch_count * one.placement.crossing_s

    shifted = (
        as_placed(choose(tree, settings, layout, part * most), layout, settings.speeds) for part in PARTS
    )
    return min((even, *(one for one in shifted if not one.revisits)), key=step_s)


def _goes_back(choice: Choice) -> bool:
    return any(before > after for before, after in pairwise(choice.stages))


def as_placed(choice: Choice, layout: Sequence[int], speeds: Sequence[float] = ()) -> Placed:
    """The choice with what its stages cost. ``speeds``: of each rank; all are as the first one if empty."""
    stages = stage_costs(choice, len(layout))
    if speeds:
        stages = tuple(slowed(stage, speeds[rank]) for stage, rank in zip(stages, layout, strict=True))
    return Placed(stages, placement=choice, revisits=_goes_back(choice))


def slowed(stage: StageCost, speed: float) -> StageCost:
    """The stage on a rank of that speed."""
    times = {
        name: getattr(stage, name) / speed for name in ("forward_s", "backward_s", "input_s", "weight_s")
    }
    return replace(stage, **times)


def stage_costs(choice: Choice, stages: int) -> tuple[StageCost, ...]:
    """The cost of each stage's pieces together, with what a microbatch costs there and following all calls."""
    costs = []
    follow_s = MICROBATCH_S + CALL_S * choice.calls * len({*choice.partitions}) / stages
    for stage in range(stages):
        pieces = [piece for piece, at in zip(choice.pieces, choice.stages, strict=True) if at == stage]
        units = [piece.unit for piece in pieces]
        size = units[-1].output_bytes if units else 0
        parameters = {number: p for piece in pieces for number, p in piece.parameters.items()}
        saved = sum(unit.activation_bytes for unit in units)
        costs.append(
            StageCost(
                forward_s=sum(unit.forward_ms for unit in units) / 1e3 + follow_s,
                backward_s=sum(unit.backward_ms for unit in units) / 1e3,
                input_s=sum(unit.input_ms or 0.0 for unit in units) / 1e3,
                weight_s=sum(unit.weight_ms or 0.0 for unit in units) / 1e3,
                forward_bytes=size,
                backward_bytes=size,
                activation_bytes=saved,
                weight_bytes=saved,  # which of these W needs is not known by unit, and it keeps gradients besides
                transient_bytes=max((unit.transient_bytes for unit in units), default=0),
                parameter_bytes=sum(map(bytes_of, parameters.values())),
            )
        )
    return tuple(costs)


class Watch:
    """Compares the first steps with their prediction, once."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, dict[str, float]]] = []
        self.done = False

    def add(self, session: Session, step_s: float, microbatches: int) -> None:
        """Count one more step, on every rank. After ``STEPS`` of them all ranks compare."""
        assert session.decided.chosen is not None and session.executor is not None
        spans = session.executor.spans
        if self.done or microbatches != session.decided.chosen.schedule.microbatches:
            return
        if not any(span.kind in ("B", "I") for span in spans):
            return
        self.steps.append((step_s, measure_stages(spans)))
        if len(self.steps) > STEPS:
            self.done = True
            compare(session, self.steps[1:])


def compare(session: Session, steps: list[tuple[float, dict[str, float]]]) -> None:
    """Log how good the prediction was; collective over all ranks."""
    own = {
        "step_s": median(step_s for step_s, _ in steps),
        "times": {key: median(times.get(key, 0.0) for _, times in steps) for key in steps[0][1]},
    }
    with session.doing("the comparison of step times"):
        texts = gather_texts(json.dumps(own), session.group("pp"))
    answer = agree_on(session, lambda: _answer(session, [json.loads(text) for text in texts]))
    if answer.strip():
        chosen = Chosen.from_json(answer)
        session.decided.use_schedule(chosen)
        step = as_weft_runs(
            chosen.schedule, chosen.stages, chosen.links, **execution(session.settings, False)
        )
        record_plan(session, Planned.of(step))


def _answer(session: Session, found: list[dict[str, Any]]) -> str:
    """The new choice as JSON; empty to stay. On the rank that decides."""
    chosen, settings = session.decided.chosen, session.settings
    assert chosen is not None
    measured_s = max(one["step_s"] for one in found)
    log.info(
        "auto: %s was predicted to take %.1f ms a step, it takes %.1f ms (%+.1f %%)",
        chosen.option, chosen.step_s * 1e3, measured_s * 1e3, 100 * (chosen.step_s / measured_s - 1),
    )  # fmt: skip
    times = {key: value for one in found for key, value in one["times"].items()}
    better = find_better(chosen, settings, times, limit_bytes(session))
    if better is None:
        return ""
    log.info(
        "auto: with the measured times %s takes %.1f ms, %s %.1f ms: that runs from now on",
        chosen.option, better.present_s * 1e3, better.chosen.option, better.chosen.step_s * 1e3,
    )  # fmt: skip
    return better.chosen.to_json()


USUAL = Links.uniform(Link(CROSSING_S / 2, BYTES_PER_S))
"""The speed of messages where nobody has measured it."""


def _halved(stage: StageCost) -> StageCost:
    """The stage with a backward pass in two halves of the same length.

    From I to W the gradients of what its products gave stay, besides what these were given. In a transformer's block
    (Korthikanti et al., arXiv 2205.05198) they are about half of the activations.
    """
    half, grads = stage.backward_s / 2, stage.activation_bytes // 2
    return replace(
        stage, input_s=half, weight_s=half, weight_bytes=stage.activation_bytes + grads,
        transient_bytes=max(stage.transient_bytes, grads),
    )  # fmt: skip


def expected_step(
    settings: Settings, choice: Choice, chosen: Chosen | None, links: Links = USUAL
) -> Simulation:
    """A step with the units where `choice` has them, by the schedule of the settings or the one that was chosen.

    `links`: what messages take; those that `chosen` was made with, if there is one.
    """
    if settings.auto_partition:
        made = schedule_for(settings, chosen, settings.microbatch_count)
    else:  # one stage a partition, whatever order they are visited in
        made = schedule.make("1f1b", settings.partitions, settings.microbatch_count)
    placed = as_placed(choice, made.rank_of_stage, settings.speeds)
    stages: Sequence[StageCost] = placed.stages
    if KINDS[settings.pipeline].splits:  # nobody measures the halves where the schedule is given
        stages = [_halved(one) for one in stages]
    if chosen is not None:
        links = chosen.links
        stages = recomputed(stages) if chosen.option.recompute else stages
    return as_weft_runs(made, stages, links, **execution(settings, placed.revisits))
