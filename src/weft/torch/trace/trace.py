"""The tracing run: one microbatch of the user's own step, the whole model on one rank, everything measured.

Nothing that it does is left behind: gradients, buffers, plain attributes of modules and random states are as before.

* forward time: around every module's call
* backward time: up to the end of every node of autograd's graph, from the one before; a node belongs to the module
  whose call made it, which its sequence number tells; and what adding up the gradients of a module's own parameters
  takes
* activation bytes: what autograd saves, each piece of memory once, parameters not at all
* which parameters and which other modules a module uses that are registered elsewhere, and what glue does

The first pass warms up and watches, the others measure until two agree (``times``): a machine may change its speed
meanwhile. The smallest time of a module, and of those alike, counts, which tells best how they compare; all are
scaled to what those passes take together, because the smallest of many times are faster than any one pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.huge_pages import HugePages
from weft.torch.calls.attributes import Attribute, note_attributes
from weft.torch.execution.thread_settings import rehearse
from weft.torch.pytorch.private import numbers_nodes, version
from weft.torch.session.random_streams import NUMPY, Streams, same_states
from weft.torch.tensors.writes import is_new
from weft.torch.trace.backward_halves import measure_halves
from weft.torch.trace.estimated_times import Clock
from weft.torch.trace.glue_watch import GlueWatch
from weft.torch.trace.kept_state import Kept
from weft.torch.trace.record import Record, Trace
from weft.torch.trace.side_effects import untouched
from weft.torch.trace.tracer import Tracer, compiles
from weft.torch.trace.typical_times import Pass, agree, kinds_of, typical

PASSES = 9
"""At most, the watching one included."""
BUDGET_S = 4.0
"""After so many seconds a pass is the last one."""


def trace(
    root: nn.Module,
    run: Callable[[], Any],
    device: torch.device,
    streams: Streams,
    clock: Clock | None = None,
    split: bool = False,
    kept: Kept | None = None,
) -> Trace:
    """Run ``run`` (the user's step on one microbatch) a few times and measure ``root`` in it.

    With a ``clock``, which must be active then, what it counts stands for time, and one measured pass is enough.
    ``split``: measure the two halves of the backward pass, too. ``kept``: what is brought back after each pass.
    """
    started = time.perf_counter()
    tracer = Tracer(root, device, clock)
    compiled = any(map(compiles, root.modules()))
    note = note_attributes if not compiled else lambda root, user: nullcontext(list[Attribute]())
    passes: list[Pass] = []
    for number in range(PASSES):
        tracer.restart(watching=number == 0)
        with untouched(root, streams, tracer.accumulated, tracer.writes, kept), tracer.attached():
            rehearse(tracer)
            try:
                if number == 0:
                    with note(root, lambda: tracer.stack[-1].name) as attributes:
                        written, replaced, numpy = watched(tracer, run, streams)
                    tracer.find_written_later(attributes)
                    if any(each.lazy for each in attributes):  # a second microbatch finds them
                        tracer.watching = False
                        places = {each.place for each in attributes}
                        # what the first one has left may have a graph that is freed
                        with suppress(RuntimeError):
                            with note(root, lambda: tracer.stack[-1].name) as again:
                                run()
                            places = {each.place for each in again}
                        attributes = [replace(each, lazy=each.place not in places) for each in attributes]
                    kinds = kinds_of(tracer.everything)
                    if device.type == "cpu":
                        HugePages().look()  # as before the steps that the times are for
                else:
                    start = tracer.now()
                    run()
                    tracer.top.forward_s = tracer.now() - start - tracer.children_s[0]
            finally:
                rehearse(None)
                tracer.give_back()
        if number > 0:
            times: Pass = {id(record): (record.forward_s, record.backward_s) for record in tracer.everything}
            if split:  # in turn, so that a machine whose speed drifts does so for both
                halves = measure_halves(tracer, run, streams, kept)
                times = {key: (*both, *halves[key]) for key, both in times.items()}
            passes.append(times)
            if clock is not None or agree(passes, kinds) or time.perf_counter() - started > BUDGET_S:
                break
    best = typical(passes, kinds)
    # a clock does not see the threads in which a GPU's backward pass runs
    uncounted = (
        device.type == "cuda"
        and clock is not None
        and not any(backward_s for _, backward_s, *_ in best.values())
    )
    for record in tracer.everything:  # who was not called may hold a parameter all the same
        record.forward_s, record.backward_s, *halves_s = best[id(record)]
        if not (tracer.went_backward and numbers_nodes) or uncounted:
            record.backward_s = 2 * record.forward_s
        if halves_s:
            record.input_s, record.weight_s = halves_s
    called = [record for record in tracer.records.values() if record.order >= 0]
    records = sorted([*called, *uncalled(tracer)], key=lambda record: record.order)
    tracer.note_writers()
    leaking = {name for name in tracer.leaking if name in tracer.records}
    return Trace(
        {r.name: r for r in records}, leaking, tracer.whole, tracer.together, written, replaced, attributes,
        tracer.operations, tracer.top, numpy, time.perf_counter() - started, tracer.written_parameters(),
        tracer.toggled, tracer.users,
    )  # fmt: skip


def watched(tracer: Tracer, run: Callable[[], Any], streams: Streams) -> tuple[set[str], set[str], bool]:
    """A pass that looks at all that ``run`` does: buffers written, buffers replaced, whether it draws from NumPy."""
    root = tracer.root
    known = {name: (b, version(b), b.detach().clone()) for name, b in root.named_buffers()}
    before = streams.capture(NUMPY)
    with tracer.writes, GlueWatch(tracer), saving(tracer.save):
        run()
    written = {n for n, b in root.named_buffers() if n not in known or is_new(b, *known[n])}
    replaced = {n for n, b in root.named_buffers() if n in known and known[n][0] is not b}
    return written, replaced, not same_states(before[2], streams.capture(NUMPY)[2])


@contextmanager
def saving(save: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, ``save`` sees what autograd keeps for the backward pass, except where ``torch.func`` allows no hooks."""
    graph = torch.autograd.graph
    hooks, original = (
        graph.saved_tensors_hooks(save, lambda tensor: tensor),
        graph.disable_saved_tensors_hooks,
    )

    @contextmanager
    def disabled(message: str) -> Iterator[None]:
        hooks.__exit__()
        try:
            with original(message):
                yield
        finally:
            hooks.__enter__()

    graph.disable_saved_tensors_hooks = disabled  # type: ignore[assignment]
    try:
        with hooks:
            yield
    finally:
        graph.disable_saved_tensors_hooks = original


def uncalled(tracer: Tracer) -> list[Record]:
    """Modules that could have been called but were not (a skipped layer, an idle expert), with a place in the order."""
    found = []
    last = 0.0
    called = [name for name, record in tracer.records.items() if record.order >= 0]
    for name, record in tracer.records.items():
        if record.order >= 0:
            last = record.order
        elif (
            type(record.module).forward is not nn.Module.forward
            and name not in tracer.hidden
            and not any(other.startswith(f"{name}.") for other in called)
        ):
            record.order = last + 0.5
            found.append(record)
    return found
