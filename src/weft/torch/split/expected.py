"""The step that a placement is expected to give: simulated, from what its units were measured to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft import schedule
from weft.config import Settings
from weft.plan.chosen import Chosen, ahead, schedule_for
from weft.plan.search import as_weft_runs, recomputed
from weft.schedule.table import KINDS
from weft.simulate import Links, Simulation, StageCost
from weft.topology.cluster import Link
from weft.torch.split.automatic import as_placed
from weft.torch.split.open_modules import BYTES_PER_S, CROSSING_S, Choice

USUAL = Links.uniform(Link(CROSSING_S / 2, BYTES_PER_S))
"""What messages take where nobody has measured it."""


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
    stages: Sequence[StageCost] = as_placed(choice, made.rank_of_stage).stages
    if KINDS[settings.pipeline].splits:  # nobody measures the halves where the schedule is given
        stages = [replace(one, input_s=one.backward_s / 2, weight_s=one.backward_s / 2) for one in stages]
    if chosen is not None:
        links = chosen.links
        stages = recomputed(stages) if chosen.option.recompute else stages
    return as_weft_runs(made, stages, links, ahead=ahead(settings))
