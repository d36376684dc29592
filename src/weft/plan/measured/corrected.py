"""A prediction beside the steps that were run: what stages cost as measured, and whether another schedule is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.config import Settings
from weft.plan.chosen import Chosen, execution, options_for
from weft.plan.explain import explain
from weft.plan.option import Placed
from weft.plan.search import search
from weft.simulate import StageCost
from weft.timeline import Span

BETTER = 0.95
"""Another schedule takes over if its step is predicted to take less than this of the present one's."""


def measure_stages(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of one microbatch by stage and kind, as `0F`, over the microbatches that ran it.

    >>> spans = [Span(0, "F", 0, 0.0, 1.0, 0), Span(0, "F", 1, 1.0, 4.0, 0), Span(0, "B", 0, 4.0, 9.0, 0)]
    >>> measure_stages(spans)
    {'0F': 2.0, '0B': 5.0}
    """
    took_s: dict[str, float] = {}
    which: dict[str, set[int]] = {}
    for span in spans:
        key = f"{span.stage}{span.kind}"
        took_s[key] = took_s.get(key, 0.0) + span.end_s - span.start_s
        which.setdefault(key, set()).add(span.microbatch)
    return {key: took_s[key] / len(which[key]) for key in took_s}


def correct(stage: StageCost, number: int, times: Mapping[str, float]) -> StageCost:
    """The costs with measured times; those of the kinds that did not run keep their proportion.

    >>> correct(StageCost(1.0, 4.0, input_s=2.0, weight_s=2.0), 0, {"0F": 3.0, "0B": 8.0}).input_s
    4.0
    """
    backward = {"B": stage.backward_s, "I": stage.input_s, "W": stage.weight_s}
    ran = [kind for kind in backward if f"{number}{kind}" in times]
    expected_s = sum(backward[kind] for kind in ran)
    scale = sum(times[f"{number}{kind}"] for kind in ran) / expected_s if expected_s else 1.0
    backward_s, input_s, weight_s = (
        times.get(f"{number}{kind}", scale * took_s) for kind, took_s in backward.items()
    )
    return dataclasses.replace(
        stage,
        forward_s=times.get(f"{number}F", stage.forward_s),
        backward_s=backward_s,
        input_s=input_s,
        weight_s=weight_s,
    )


class Better(NamedTuple):
    """A choice that takes over, and what the one before takes by the measured times."""

    chosen: Chosen
    present_s: float


def find_better(
    chosen: Chosen, settings: Settings, times: Mapping[str, float], memory_bytes: float | None = None
) -> Better | None:
    """The choice that takes over with measured times; None where the present one stays.

    Only schedules count that run on the stages as they are placed, in the memory that a rank has. A step that computes
    activations anew is measured with that work in its backward passes, so nothing can be said of other steps.
    """
    if settings.pipeline == "file" or chosen.option.recompute:
        return None
    limits = None if memory_bytes is None else [int(memory_bytes)] * settings.partitions
    stages = tuple(correct(stage, number, times) for number, stage in enumerate(chosen.stages))
    layout = chosen.schedule.rank_of_stage
    tried = [
        option
        for option in options_for(settings, limits is not None)
        if not option.recompute and option.layout(settings.partitions) == layout
    ]
    found = search(
        settings.partitions,
        settings.microbatch_count,
        lambda _: Placed(stages),
        chosen.links,
        memory_bytes=limits,
        tried=tried,
        **execution(settings, revisits=False),
    )
    present = next(one for one in found if one.option == chosen.option)
    if found[0].fault or found[0].step_s > BETTER * present.step_s:
        return None
    return Better(Chosen.of(found[0], chosen.links, explain(found)), present.step_s)
