"""Step times as weft predicts them: traced costs, measured link, simulated step. No step is run for them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft import schedule
from weft.plan.chosen import ahead
from weft.plan.option import Option
from weft.plan.search import Found, search
from weft.simulate import FREE
from weft.torch.interceptions import install
from weft.torch.model import DistributedModel
from weft.torch.session import current
from weft.torch.session.collectives import agree_on
from weft.torch.split.automatic import links_of, place_units
from weft.torch.split.link_speed import keep_others_busy, measure_link
from weft.torch.split.partition_models import trace_step
from weft.torch.split.unit_tree import Tree
from weft.torch.step import Step
from weft.torch.tensors.mini_batch import prepare


def predictions(
    model: DistributedModel, step: Step, inputs: Sequence[Any], schedules: Sequence[str]
) -> dict[str, float]:
    """The predicted step time of each schedule, in seconds; collective over the ranks of the pipeline.

    `model` is one that no step has split yet, `step(model, *inputs)` would train it.
    """
    session = current.session()
    settings = session.settings
    install()
    batch = prepare(step.function, (model, *inputs), {}, step.cut, settings.microbatches)
    link = measure_link(session)

    def predicted(tree: Tree, name: str) -> Found:
        own = replace(settings, pipeline=name)
        (found,) = search(
            settings.partitions,
            settings.microbatches,
            functools.partial(place_units, tree, own, FREE),  # as without `auto`, which measures the link
            links_of(tree, link),
            tried=[Option(name, chunks=chunks_of(name, settings.chunks))],
            ahead=ahead(own),
        )
        return found

    def decide() -> str:
        tree = Tree(model.module, trace_step(session, model, step.function, batch, counted=False))
        found = [predicted(tree, name) for name in schedules]
        faults = [f"{one.option}: {one.fault}" for one in found if one.fault]
        if faults:
            raise RuntimeError("; ".join(faults))
        return json.dumps({one.option.schedule: one.step_s for one in found})

    with keep_others_busy(session):
        return json.loads(agree_on(session, decide))


def chunks_of(name: str, chunks: int) -> int | None:
    """`chunks` where the schedule leaves their number free."""
    return chunks if schedule.CHUNKS[name][1] is None else None
