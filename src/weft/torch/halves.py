"""What the two halves of the backward pass cost, measured: I (for the inputs) and W (for the weights)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.torch.deferred import DeferWeights, Task
from weft.torch.random_state import Streams
from weft.torch.untouched import untouched

if TYPE_CHECKING:
    from weft.torch.trace import Record, Tracer


def measure_halves(tracer: Tracer, run: Callable[[], Any], streams: Streams) -> dict[int, tuple[float, ...]]:
    """Run the traced step with weight gradients left for later: the seconds of F, I and W of each record, by its id.

    Weight gradients belong to the module that holds the parameter. They are computed twice: from its second microbatch
    on a step adds to those that are there, and that is what counts.
    """
    weights = {id(record): 0.0 for record in tracer.everything}
    tracer.restart(watching=False)
    tasks: list[Task] = []
    tracer.tasks = tasks
    with untouched(tracer.root, streams, forget=None):
        with tracer.attached(), DeferWeights():
            tracer.set_current(True)
            try:
                run()
            finally:
                tracer.set_current(False)
                tracer.tasks = None
        for task in tasks:
            task()
        for task in tasks:
            start = tracer.now()
            task()
            holder = tracer.own.get(id(task.parameter), "").rpartition(".")[0]
            weights[id(tracer.records[holder])] += tracer.now() - start
    return {id(r): (r.forward_s, r.backward_s, weights[id(r)]) for r in tracer.everything}


def set_halves(record: Record, forward_s: float, input_s: float, weight_s: float) -> None:
    """Give ``input_s`` and ``weight_s`` from what such a run has measured.

    What leaving the weights for later adds to the forward pass counts for I.
    """
    record.weight_s = weight_s
    record.input_s = input_s + max(0.0, forward_s - record.forward_s)
