"""Reports: the partition's table, the timeline of the last step, the units for recordings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.analysis.run import Unit as Recorded
from weft.errors import UsageError
from weft.report.placement import ModelPlacement, PartitionReport
from weft.timeline import Timeline
from weft.torch.execution.unit_call import FLOATING
from weft.torch.placed.plan import Plan
from weft.torch.session import current
from weft.torch.session.collectives import gather_texts


def partition_report(model: Any = None) -> PartitionReport:
    """Where everything lies: ``print`` it for tables of units and of partitions, with warnings where they are uneven.

    ``to_dict()`` gives plain values, and a notebook shows it by itself. ``model``: which one, if there are several.

    Raises :class:`UsageError` before the first step, which makes the partition.
    """
    session = current.session()
    models = (
        [model] if model is not None else [m for m in session.models if m.partitioned or m.plan is not None]
    )
    if not models:
        raise UsageError("there is no partition yet: the first step makes it")
    settings, chosen = session.settings, session.decided.chosen
    return PartitionReport(
        tuple(
            ModelPlacement((), 1)
            if m.plan is None
            else m.plan.placement(settings.partitions, settings.microbatch_count)
            for m in models
        ),
        "\n".join(filter(None, (session.decided.number_reasons, "" if chosen is None else chosen.reasons))),
    )


def describe_units(plan: Plan) -> Iterator[Recorded]:
    """The units of a plan, for a recording."""
    for planned in plan.units:
        if planned.partition != FLOATING:
            unit = planned.unit
            yield Recorded(
                unit.name,
                planned.partition,
                unit.forward_ms / 1e3,
                unit.backward_ms / 1e3,
                unit.parameter_bytes,
            )


def recorded_timeline() -> Timeline:
    """The timeline of each rank of the pipeline in the last step; collective over the pipeline, times in seconds.

    Spans carry the pipeline rank. The clock is the host's, so spans of ranks on one host line up.
    """
    session = current.session()
    if session.executor is None:
        return Timeline([])
    own = Timeline(session.executor.spans)
    merged = Timeline([])
    with session.doing("recorded_timeline()"):
        texts = gather_texts(own.to_json(), session.group("pp"))
    for text in texts:
        merged = merged.merged(Timeline.from_json(text))
    return merged.shifted(-merged.start_s)
