"""The costs of the two halves of the backward pass, measured: I (for the inputs) and W (for the weights)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.torch.backward.weight_gradients import Task
from weft.torch.execution.thread_settings import rehearse
from weft.torch.session.random_streams import Streams
from weft.torch.trace.kept_state import Kept
from weft.torch.trace.side_effects import without_side_effects
from weft.torch.trace.tracer import Tracer


def measure_halves(
    tracer: Tracer, run: Callable[[], Any], streams: Streams, kept: Kept | None = None
) -> dict[int, tuple[float, ...]]:
    """The seconds of I and W of each record, by its id; the traced step runs with weight gradients left for later.

    Weight gradients belong to the module that holds the parameter. They are computed twice, and the second time counts:
    from its second microbatch on a step adds to gradients that are there.
    """
    weights = {id(record): 0.0 for record in tracer.everything}
    tracer.restart(watching=False)
    tasks: list[Task] = []
    tracer.tasks = tasks
    with without_side_effects(tracer.root, streams, None, tracer.writes, kept):
        with tracer.intercept_calls():
            rehearse(tracer)
            try:
                run()
            finally:
                rehearse(None)
                tracer.tasks = None
        for task in tasks:
            task()
        for task in tasks:
            start = tracer.now()
            task()
            holder = tracer.own.get(id(task.parameter), "").rpartition(".")[0]
            weights[id(tracer.records[holder])] += tracer.now() - start
        tracer.give_back()
    return {id(record): (record.backward_s, weights[id(record)]) for record in tracer.everything}
