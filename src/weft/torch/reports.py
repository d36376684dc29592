"""What happened, for people: the partition's table, the timeline of the last step."""

from __future__ import annotations

from typing import Any

from weft.errors import UsageError
from weft.timeline import Timeline
from weft.torch import state
from weft.torch.collective import gather_texts


def partition_report(model: Any = None) -> str:
    """The placement as a table: unit, partition, parameters, bytes, forward ms, backward ms, share of the cost; and why
    `auto` has chosen its schedule.

    ``model``: which one, if there are several.
    """
    models = [model] if model is not None else [m for m in state.session().models if m.partitioned]
    if not models:
        raise UsageError("there is no partition yet: the first step makes it")
    tables = [
        "one partition: the whole model on every rank" if m.plan is None else m.plan.table() for m in models
    ]
    chosen = state.session().chosen
    return "\n\n".join(tables if chosen is None else [*tables, chosen.reasons])


def recorded_timeline() -> Timeline:
    """What each rank of the pipeline ran when in the last step; collective over the pipeline, times in seconds.

    Spans carry the pipeline rank. The clock is the host's, so spans of ranks on one host line up.
    """
    session = state.session()
    if session.executor is None:
        return Timeline([])
    own = Timeline(session.executor.spans)
    merged = Timeline([])
    with session.doing("recorded_timeline()"):
        texts = gather_texts(own.to_json(), session.group("pp"))
    for text in texts:
        merged = merged.merged(Timeline.from_json(text))
    return merged.shifted(-merged.start_s)
