"""What the two halves of the backward pass cost, measured: I (for the inputs) and W (for the weights)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.torch.deferred import DeferWeights, Task
from weft.torch.random_state import Streams
from weft.torch.times import typical
from weft.torch.untouched import untouched

if TYPE_CHECKING:
    from weft.torch.trace import Tracer


def measure_halves(tracer: Tracer, run: Callable[[], Any], streams: Streams) -> dict[str, tuple[float, ...]]:
    """Run the traced step with weight gradients left for later: the seconds of F, I and W of each module.

    Weight gradients belong to the module that holds the parameter.
    """
    weights = dict.fromkeys(tracer.records, 0.0)
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
            start = tracer.now()
            task()
            holder = tracer.own.get(id(task.parameter), "").rpartition(".")[0]
            weights[holder] += tracer.now() - start
    return {name: (r.forward_s, r.backward_s, weights[name]) for name, r in tracer.records.items()}


def set_halves(tracer: Tracer, passes: Sequence[Mapping[str, tuple[float, ...]]]) -> None:
    """Give ``input_s`` and ``weight_s`` from what a few passes have measured.

    What leaving the weights for later adds to the forward pass counts for I.
    """
    for name, (forward_s, input_s, weight_s) in typical(passes).items():
        record = tracer.records[name]
        record.weight_s = weight_s
        record.input_s = input_s + max(0.0, forward_s - record.forward_s)
