"""The tracing run: one microbatch of the user's own step, the whole model on one rank, everything measured.

Nothing of the run is left behind, see ``dry_run``.

* Forward time is taken around every module's call.
* Backward time is taken at the end of every node of autograd's graph, from the end of the node before. A node belongs
  to the module whose call made it; the node's sequence number says which. Adding up the gradients of a module's own
  parameters counts for the module, too.
* Activation bytes are what autograd saves: each piece of memory once, parameters not at all.
* Also noted: which parameters and other modules a module uses that are registered elsewhere, and what glue does.

The first pass warms up and watches. The others measure until two of them agree (see ``typical_times``), because a
machine may change its speed meanwhile. The smallest time of a module, and of modules alike, counts: it shows best how
modules compare. All times are then scaled to what the agreeing passes take together, because the smallest of many times
are faster than any one pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError
from weft.torch.backward.weight_gradients import Task
from weft.torch.calls.attributes import Attribute, note_attributes
from weft.torch.calls.own_hooks import Hooks
from weft.torch.execution.chunked_loss import may_be_chunked
from weft.torch.execution.gradients import refuse_gradient
from weft.torch.execution.thread_settings import rehearsed
from weft.torch.pytorch.private import numbers_nodes, storage_key, version
from weft.torch.pytorch.torch_functions import GRADIENT_SETTER, GRADIENTS, METADATA, memory_written
from weft.torch.session.random_streams import NUMPY, same_states
from weft.torch.tensors.marks import is_new, noted
from weft.torch.trace.compiled import compiles
from weft.torch.trace.dry_run import Snapshot
from weft.torch.trace.record import Record, Trace
from weft.torch.trace.times import Clock, Pass, agree, kinds_of, typical_times
from weft.torch.trace.tracer import Tracer

BY_NESTED = (
    "has nested tensors (torch.nested) in its own code, so it stays on one partition as a whole. To split it, keep "
    "them inside of its modules, and hand their values() and offsets() over"
)


TOGGLES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
GRADIENT_ACCESS = GRADIENTS | {GRADIENT_SETTER}


class GlueWatch(TorchFunctionMode):
    """Counts the operations that each module's own code runs, and notes which parameters they use."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TOGGLES and id(args[0]) in self.tracer.own:
            self.tracer.toggled.add(self.tracer.own[id(args[0])])
        if func in METADATA:
            return func(*args, **(kwargs or {}))
        if self.tracer.going_back:  # an activation checkpoint runs it again
            return self.tracer.note_recomputed(func(*args, **(kwargs or {})), args)
        if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
            raise UsageError(
                f"torch.distributed.{func.__name__}() was called inside a weft.step function, where ranks come at "
                "different times, and the first rank alone while it traces: call it before or after the step"
            )
        record = self.tracer.stack[-1]
        if func in GRADIENT_ACCESS and self.tracer.outside_modules and id(args[0]) in self.tracer.own:
            refuse_gradient(args[0], "reads" if func in GRADIENTS else "sets")
        record.operations += 1
        own = self.tracer.own
        operands = []
        placed = False
        for item in (*args, *(kwargs or {}).values()):
            for part in item if isinstance(item, (list, tuple)) else (item,):
                if isinstance(part, nn.Parameter) and id(part) in own:
                    record.parameters_used.setdefault(id(part), self.tracer.calls)
                    self.tracer.note_user(own[id(part)], record)
                    placed = True
                elif isinstance(part, Tensor):
                    if id(part) in self.tracer.buffers:
                        self.tracer.note_user(self.tracer.buffers[id(part)], record)
                    self.tracer.use(part, record)
                    operands.append(part)
                    placed |= part._weft_made is not None and part._weft_made.placed  # type: ignore[attr-defined]
        result = func(*args, **(kwargs or {}))
        for target in memory_written(func, args, kwargs or {}):
            self.tracer.writings.append((storage_key(target), version(target), record))
        if isinstance(result, Tensor) and result.is_nested:
            self.tracer.whole.setdefault(record.name, BY_NESTED)
        self.tracer.create(result, record, placed)
        self.tracer.operations.note(record.name, operands, result)
        return result


def measure_halves(tracer: Tracer, run: Callable[[], Any]) -> dict[int, tuple[float, ...]]:
    """The seconds of I and W of each record, by its id; the traced step runs with weight gradients left for later.

    Weight gradients belong to the module that holds the parameter. They are computed twice, and the second time counts:
    from its second microbatch on a step adds to gradients that are there.
    """
    weights = {id(record): 0.0 for record in tracer.everything}
    tracer.restart(watching=False)
    tasks: list[Task] = []
    tracer.tasks = tasks
    with tracer.snapshot.restored(None, watch=False):
        with tracer.intercept_calls(), rehearsed(tracer):
            try:
                run()
            finally:
                tracer.tasks = None
        for task in tasks:
            task()
        for task in tasks:
            start = tracer.now()
            task()
            holder = tracer.own.get(id(task.parameter), "").rpartition(".")[0]
            weights[id(tracer.records[holder])] += tracer.now() - start
    return {id(record): (record.backward_s, weights[id(record)]) for record in tracer.everything}


PASSES = 9
"""The most passes, the watching one included."""
BUDGET_S = 4.0
"""No pass begins after so many seconds."""


def trace(
    root: nn.Module,
    run: Callable[[], Any],
    device: torch.device,
    snapshot: Snapshot,
    clock: Clock | None = None,
    split: bool = False,
    chunked_loss: str = "off",
) -> Trace:
    """The measured records of ``root`` in ``run``, the user's step on one microbatch, which runs a few times.

    ``snapshot``: is brought back after each pass. ``clock``: counts instead of measuring, and must be active; one
    measured pass is enough then. ``split``: the two halves of the backward pass are measured, too. ``chunked_loss``:
    the setting; logits of that size take no memory in a step, unless the step returns them.
    """
    started = time.perf_counter()
    tracer = Tracer(root, device, snapshot, clock)
    tracer.is_chunked = may_be_chunked(root, chunked_loss)
    compiled = any(map(compiles, root.modules()))  # asked before calls are intercepted in the same place
    passes: list[Pass] = []
    for number in range(PASSES):
        tracer.restart(watching=number == 0)
        with (
            snapshot.restored(tracer.take_gradient, watch=number == 0),
            tracer.intercept_calls(),
            rehearsed(tracer),
        ):
            if number == 0:
                before = _dtypes(root)
                attributes, hooks, written, replaced, numpy = _run_and_watch(tracer, run, compiled)
                cast = {name: dtype for name, dtype in _dtypes(root).items() if dtype != before.get(name)}
                kinds = kinds_of(tracer.everything)
            else:
                start = tracer.now()
                run()
                tracer.top.forward_s = tracer.now() - start - tracer.children_s[0]
        if number > 0:
            times: Pass = {id(record): (record.forward_s, record.backward_s) for record in tracer.everything}
            if split:  # right after the pass, so that a machine whose speed drifts does so for both
                halves = measure_halves(tracer, run)
                times = {key: (*both, *halves[key]) for key, both in times.items()}
            passes.append(times)
            if clock is not None or agree(passes, kinds) or time.perf_counter() - started > BUDGET_S:
                break
    _set_times(tracer, typical_times(passes, kinds))
    called = [record for record in tracer.records.values() if record.order >= 0]
    records = sorted([*called, *find_uncalled(tracer)], key=lambda record: record.order)
    tracer.note_writers()
    leaking = {name for name in tracer.leaking if name in tracer.records}
    return Trace(
        {r.name: r for r in records}, leaking, tracer.whole, tracer.function_calls, written, replaced, attributes,
        tracer.operations, tracer.top, numpy, time.perf_counter() - started, tracer.written_parameters(),
        tracer.toggled, tracer.users, tracer.readers, hooks, cast,
    )  # fmt: skip


def _dtypes(root: nn.Module) -> dict[str, str]:
    return {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in root.named_parameters()}


def _set_times(tracer: Tracer, best: dict[Any, tuple[float, ...]]) -> None:
    """Give each record its times. A backward pass that could not be timed takes twice as long as the forward pass."""
    # a clock does not see the threads in which a GPU's backward pass runs
    uncounted = (
        tracer.device.type == "cuda"
        and tracer.clock is not None
        and not any(backward_s for _, backward_s, *_ in best.values())
    )
    for record in tracer.everything:  # a module that was not called may hold a parameter all the same
        record.forward_s, record.backward_s, *halves_s = best[id(record)]
        if not (tracer.went_backward and numbers_nodes) or uncounted:
            record.backward_s = 2 * record.forward_s
        if halves_s:
            record.input_s, record.weight_s = halves_s


def _run_and_watch(
    tracer: Tracer, run: Callable[[], Any], compiled: bool
) -> tuple[list[Attribute], dict[str, tuple[str, ...]], set[str], set[str], bool]:
    """The attributes that ``run`` writes, the hooks that run with their modules, the buffers that ``run`` writes or
    replaces, and whether it draws from NumPy.

    ``compiled``: some modules are. Attributes are not looked at then.
    """
    root = tracer.root
    hooks = Hooks(root)

    def note() -> AbstractContextManager[list[Attribute]]:
        if compiled:
            return nullcontext(list[Attribute]())
        return note_attributes(root, lambda: hooks.user(tracer.stack[-1].name))

    with nullcontext() if compiled else hooks.watched(), note() as attributes:
        buffers = _watch_buffers(tracer, run)
    tracer.find_written_later(attributes)
    if any(each.lazy for each in attributes):  # made where missing: a second run finds them
        tracer.watching = False
        places = {each.place for each in attributes}
        # what the first run has left may belong to a graph that is freed
        with suppress(RuntimeError):
            with note() as again:
                run()
            places = {each.place for each in again}
        attributes = [replace(each, lazy=each.place not in places) for each in attributes]
    return attributes, hooks.own(attributes), *buffers


def _watch_buffers(tracer: Tracer, run: Callable[[], Any]) -> tuple[set[str], set[str], bool]:
    """The buffers that ``run`` writes, those that it replaces, and whether it draws from NumPy."""
    root, streams = tracer.root, tracer.snapshot.streams
    known = noted(root)
    before = streams.capture(NUMPY)
    with GlueWatch(tracer), see_saved_tensors(tracer.save):
        result = run()
    tracer.note_result(result)
    written = {n for n, b in root.named_buffers() if n not in known or is_new(b, *known[n])}
    replaced = {n for n, b in root.named_buffers() if n in known and known[n][0] is not b}
    return written, replaced, not same_states(before[2], streams.capture(NUMPY)[2])


@contextmanager
def see_saved_tensors(save: Callable[[Tensor], Tensor]) -> Iterator[None]:
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


def find_uncalled(tracer: Tracer) -> list[Record]:
    """Modules that could have been called but were not (a skipped layer, an idle expert), placed where they stand."""
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
