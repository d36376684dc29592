"""What the two halves of the backward pass cost, measured: I (for the inputs) and W (for the weights)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.torch.deferred import DeferWeights, Task
from weft.torch.random_state import Streams
from weft.torch.untouched import untouched

if TYPE_CHECKING:
    from weft.torch.trace import Tracer

PASSES = 2


def measure_halves(tracer: Tracer, run: Callable[[], Any], streams: Streams) -> None:
    """Run the traced step with weight gradients left for later; gives ``input_s`` and ``weight_s``.

    The smallest time of a few passes counts. Weight gradients belong to the module that holds the parameter. What
    leaving them for later adds to the forward pass counts for I.
    """
    halves: dict[str, tuple[float, float, float]] = {}
    whole = {name: (record.forward_s, record.backward_s) for name, record in tracer.records.items()}
    for _ in range(PASSES):
        weights = _pass(tracer, run, streams)
        for name, record in tracer.records.items():
            found = record.forward_s, record.backward_s, weights[name]
            halves[name] = tuple(map(min, found, halves.get(name, found)))  # type: ignore[assignment]
    for name, record in tracer.records.items():
        forward_s, input_s, record.weight_s = halves[name]
        record.forward_s, record.backward_s = whole[name]
        record.input_s = input_s + max(0.0, forward_s - record.forward_s)


def _pass(tracer: Tracer, run: Callable[[], Any], streams: Streams) -> dict[str, float]:
    """The seconds of W of each module; those of I are in ``backward_s`` of the records then."""
    weights = dict.fromkeys(tracer.records, 0.0)
    for record in tracer.records.values():
        record.forward_s = record.backward_s = 0.0
    tracer.events = []
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
            start = tracer.now()
            task()
            holder = tracer.own.get(id(task.parameter), "").rpartition(".")[0]
            weights[holder] += tracer.now() - start
    return weights
