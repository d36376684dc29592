"""The tracer: it watches and times the modules of a model while a step runs; ``trace`` makes it and runs the step."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.backward.autograd import graph_nodes, run_autograd
from weft.torch.backward.weight_gradients import Task, take_weights
from weft.torch.calls.attributes import Attribute
from weft.torch.calls.call_signature import hidden_in
from weft.torch.calls.container_writes import Contents
from weft.torch.calls.interception import intercepted
from weft.torch.execution.gradients import Gradients, Tensors, root_gradients
from weft.torch.pytorch.private import (
    LEAF_NUMBER,
    base_of,
    call_of,
    has_memory,
    next_node_number,
    number_of,
    storage_key,
)
from weft.torch.tensors.description import Describer
from weft.torch.tensors.marks import unwritten
from weft.torch.tensors.pytree import captured_in, modules_in, tensors_in
from weft.torch.trace.compiled import compiles, inside_compiled, without_modes
from weft.torch.trace.dry_run import Snapshot
from weft.torch.trace.operations import Operations
from weft.torch.trace.record import (
    Made,
    Received,
    Record,
    Running,
    Share,
    contains,
    has_other_parameters,
)
from weft.torch.trace.saved_memory import SavedMemory
from weft.torch.trace.times import Clock

BY_FUNCTION = (
    "calls modules in the torch.autograd.Function {}, which may call them in its backward pass too, so it stays on one "
    "partition as a whole. If the function gets these modules as arguments, only they have to lie together"
)
BY_SWAPPING = (
    "calls {} with other parameters (torch.func.functional_call, a parametrization), so it stays on one partition as a "
    "whole. To split it, keep that call in a smaller module"
)


class Tracer:
    """Measures ``root`` while the step runs. Backward passes report to the tracer that ``rehearsal()`` gives."""

    def __init__(
        self, root: nn.Module, device: torch.device, snapshot: Snapshot, clock: Clock | None = None
    ) -> None:
        self.root = root
        self.device = device
        self.snapshot = snapshot
        self.clock = clock
        self.records = {name: Record(name, module) for name, module in root.named_modules()}
        self.top = Record("", root)
        self.everything = (*self.records.values(), self.top)
        self.hidden = inside_compiled(root)
        """Modules inside of compiled modules. Nothing is put around them: the compiler must see them alone."""
        self.stack: list[Record] = [self.top]
        self.received: list[Received] = []
        """What was handed to each module that runs at present, outermost first; the step itself is left out."""
        self.children_s = [0.0]
        self.latest = 0.0
        """The order of the module that was called last."""
        self.since = 0.0
        """When the code that runs at present began, or went on after a module that it called."""
        self.events: list[tuple[int, Record, float]] = []
        self.calls = 0
        self.watching = True
        self.own: dict[int, str] = {id(parameter): name for name, parameter in root.named_parameters()}
        self.buffers: dict[int, str] = {id(buffer): name for name, buffer in root.named_buffers()}
        self.users: dict[str, set[str | None]] = {}
        self.memory = SavedMemory(root.parameters())
        self.is_chunked: Callable[[Tensor], bool] = lambda tensor: False
        """True for what a step computes in chunks, if nothing but a loss uses it."""
        self.chunked: list[tuple[Record, Share, int]] = []
        """The tensors of it that autograd keeps here: who made them, and how many bytes."""
        self.seen_storages = {storage_key(p) for p in root.parameters()}
        self.saved: list[int] = []
        """The storages that autograd keeps for the backward pass."""
        self.went_backward = False
        self.going_back = False
        self.recomputed_bytes = 0
        """Of the results that activation checkpoints have computed again since a node of the backward pass ran."""
        self.reached = 0.0
        """The moment up to which the time of the backward pass has been counted."""
        self.leaking: set[str] = set()
        self.readers: set[str] = set()
        """Modules that use what others have put into containers and objects."""
        self.writings: list[tuple[int, int, Record]] = []
        """Each writing in place: the memory, how often that memory had been written then, and the writing module."""
        self.toggled: set[str] = set()
        self.whole: dict[str, str] = {}
        self.swapped = False
        """Whether a module runs with parameters that are not the model's."""
        self.function_calls: list[tuple[str, set[str]]] = []
        self.functions: list[Running] = []
        self.operations = Operations()
        self.tasks: list[Task] | None = None

    def restart(self, watching: bool) -> None:
        """Forget the times of the last pass. ``watching``: the next one notes what modules do, too."""
        self.watching = watching
        self.events = []
        self.children_s = [0.0]
        self.latest = 0.0
        self.since = self.now()
        for record in self.everything:
            record.calls = 0
            record.forward_s = record.backward_s = 0.0
            for share in record.shares.values():
                share.forward_s = share.backward_s = 0.0

    def now(self) -> float:
        if self.clock is not None:
            return self.clock.seconds
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def outside_modules(self) -> bool:
        """True if the step's own code runs."""
        return self.stack[-1] is self.top

    # --- forward ------------------------------------------------------------------------------------------

    def intercept_calls(self) -> AbstractContextManager[None]:
        """Inside, this sees the calls of all modules."""
        modules = [(one, one.module) for one in self.records.values() if one.name not in self.hidden]
        return intercepted([(module, self._interceptor(one, call_of(module))) for one, module in modules])

    def _interceptor(self, record: Record, inner: Callable[..., Any]) -> Callable[..., Any]:
        if compiles(record.module):
            inner = without_modes(inner)
        kind = type(record.module)  # a parametrization makes it another one

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.going_back:
                return inner(*args, **kwargs)  # an activation checkpoint runs it again
            if record.order < 0:
                self.calls += 1
                record.order = self.calls
            record.calls += 1
            if self.stack[-1] is not self.top:
                self.stack[-1].called.add(record.name)
            for function in self.functions:
                if id(record.module) in function.given:
                    function.called.add(record.name)
                else:
                    self.whole[function.caller.name] = BY_FUNCTION.format(function.name)
            swapped = self.watching and not self.swapped
            swapped &= type(record.module) is not kind or has_other_parameters(record.module, self.own)
            if swapped:
                self._note_swapped(record)
            self.stack.append(record)
            self.received.append(Received(record, (args, kwargs)))
            self.children_s.append(0.0)
            self.events.append((next_node_number(), record, record.order))
            contents, untouched = None, []
            if self.watching:
                self.operations.note_call(record.name, tensors_in((args, kwargs)))
                contents = Contents((*args, *kwargs.values()))
                untouched = [unwritten(tensor) for tensor in hidden_in((args, kwargs))]
                known = (one._weft_made for one in captured_in((args, kwargs)))  # type: ignore[attr-defined]
                if any(made is not None and made.placed for made in known):
                    self.leaking.add(record.name)
            start = self.now()
            self._pause(self.stack[-2], start)
            self.latest = record.order
            try:
                result = inner(*args, **kwargs)
            finally:
                end = self.now()
                took = end - start
                self._pause(record, end)
                record.forward_s += took - self.children_s.pop()
                self.children_s[-1] += took
                self.stack.pop()
                self.received.pop()
                self.swapped &= not swapped
                self.events.append((next_node_number(), self.stack[-1], self.latest))
            if contents is not None:
                self._look_at(record, result, (args, kwargs))
                self._look_into(record, contents)
                if not all(as_before() for as_before in untouched):
                    self.leaking.add(record.name)
            return result

        return call

    def _pause(self, record: Record, now: float) -> None:
        """A part of the record's own code ends now: it calls a module, or it is done."""
        record.share(self.latest).forward_s += now - self.since
        self.since = now

    def _note_swapped(self, record: Record) -> None:
        """Note, or refuse, a call of a module with parameters of another one: all microbatches would see these."""
        self.swapped = True
        if self.outside_modules:
            raise UsageError(
                f"the step calls {record.name or 'the model'} with other parameters (torch.func.functional_call), "
                "which microbatches in flight would see of each other: do that in a module of the model, which then "
                "stays on one partition as a whole"
            )
        self.whole[self.stack[-1].name] = BY_SWAPPING.format(record.name)

    @contextmanager
    def inside_function(self, name: str, arguments: Any) -> Iterator[None]:
        """Inside, an autograd function runs. Modules that the function calls may run again in its backward pass."""
        given = {id(part) for module in modules_in(arguments) for part in module.modules()}
        self.functions.append(Running(name, self.stack[-1], given))
        try:
            yield
        finally:
            done = self.functions.pop()
            self.function_calls.append((done.name, done.called))

    def _look_at(self, record: Record, result: Any, inputs: Any) -> None:
        describer = Describer(inputs)
        try:
            describer.describe(result)
        except UsageError:
            record.describable = False
        record.output_bytes += sum(t.numel() * t.element_size() for t in describer.tensors)
        for tensor in describer.tensors:
            made = tensor._weft_made  # type: ignore[attr-defined]
            if made is not None:
                self._note_readers(made, record)
                made.returned.add(record.name)

    def _look_into(self, record: Record, contents: Contents) -> None:
        """Note what a call has put into containers and objects. It leaks what cannot be sent to other ranks, and what
        it puts where other microbatches find it."""
        try:
            changes = contents.changes()
            Describer(()).describe(changes)
        except UsageError:
            self.leaking.add(record.name)
            return
        changed = [contents.things[number] for number, _ in changes]
        for argument in contents.arguments if changed else ():
            things = Contents([argument]).things
            if any(map(self.snapshot.kept.knows, things)) and any(
                one is other for one in things for other in changed
            ):
                self.leaking.add(record.name)
        for tensor in tensors_in(changes):
            made = tensor._weft_made  # type: ignore[attr-defined]
            if made is not None:
                self._note_readers(made, record)
                made.returned.add(record.name)
                made.left.add(record.name)

    def _note_readers(self, made: Made, *records: Record) -> None:
        """Note who uses a tensor, or hands it on, that another module has put into a container or object: these
        ``records`` and the calls around."""
        if made.left:
            for record in (*records, *(received.record for received in reversed(self.received))):
                if contains(record.name, made.maker, False):
                    break
                self.readers.add(record.name)

    def create(self, result: Any, record: Record, placed: bool) -> None:
        """Note that a module's own code made or wrote the tensors of ``result``; ``placed``: out of parameters."""
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                if tensor._weft_made is None:  # type: ignore[attr-defined]
                    tensor._weft_made = Made(record.name)  # type: ignore[attr-defined]
                tensor._weft_made.placed |= placed  # type: ignore[attr-defined]

    def use(self, tensor: Tensor, record: Record) -> None:
        """Note that ``record``'s own code uses a tensor: modules around its maker that did not return it leak it."""
        made = tensor._weft_made  # type: ignore[attr-defined]
        if made is None:
            return
        maker, returned = made.maker, made.returned
        if made.placed:
            for received in reversed(self.received):
                name = received.record.name
                if contains(name, maker, False):
                    break
                if not received.has(tensor):  # a closure, an object of the script's own
                    self.leaking.add(name)
        self._note_readers(made)
        if maker == record.name:
            return
        around = self._around(maker, record)
        if any(name in self.records and self.records[name].calls and name not in returned for name in around):
            self.leaking.update(
                name for name in around if name not in made.left and (name != maker or maker not in returned)
            )

    def find_written_later(self, attributes: Iterable[Attribute]) -> None:
        """Note modules whose ``attributes`` hold what outside code has written: opened, they show the writing."""
        for each in attributes:
            for memory, count, record in self.writings:
                if count > each.held.get(memory, count):
                    self.leaking.update(name for user in each.users for name in self._around(user, record))

    def _around(self, inner: str, record: Record) -> list[str]:
        """The module ``inner``, and the modules around ``inner`` that do not have the code of ``record`` inside."""
        around: list[str] = []
        while not contains(inner, record.name, self.top is record):
            around.append(inner)
            if not inner:
                break
            inner = inner.rpartition(".")[0]
        return around

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd keeps for the backward pass; what autograd is to keep instead."""
        pointer = storage_key(tensor) if tensor.layout == torch.strided else 0
        self.saved.append(pointer)  # no set: a compiler may follow this
        if torch.compiler.is_compiling():  # it knows no places in memory
            if pointer not in self.seen_storages:
                self.seen_storages.add(pointer)
                size = tensor.numel() * tensor.element_size()
                self.stack[-1].keep(size)
        else:
            record, share = self.stack[-1], self.stack[-1].share(self.latest)
            if self.is_chunked(tensor):
                self.chunked.append((record, share, self.memory.add(tensor)))
            else:
                record.keep(self.memory.add(tensor), share)
        return tensor.detach() if tensor.grad_fn is not None else tensor

    def note_result(self, result: Any) -> None:
        """Count what the step would compute in chunks, if the step returns any of it."""
        if self.chunked and any(map(self.is_chunked, tensors_in(result))):
            for record, share, size in self.chunked:
                record.keep(size, share)

    def written_parameters(self) -> dict[str, bool]:
        """The parameters that a forward pass wrote, by name, and whether autograd has kept each."""
        storages = self.snapshot.writes.written()
        if not storages:
            return {}
        keys = {name: storage_key(parameter) for name, parameter in self.root.named_parameters()}
        saved = set(self.saved)
        return {name: key in saved for name, key in keys.items() if key in storages}

    def note_user(self, name: str, record: Record) -> None:
        """Note that ``record``'s own code uses a parameter or buffer; None is noted for the step's code."""
        self.users.setdefault(name, set()).add(None if record is self.top else record.name)

    def note_writers(self) -> None:
        """Note modules that have written into a parameter or buffer, through whatever view, as its users."""
        named = (*self.root.named_parameters(), *self.root.named_buffers())
        names: dict[int, list[str]] = {}
        for name, tensor in named:
            if has_memory(tensor):
                names.setdefault(storage_key(tensor), []).append(name)
        for memory, _, record in self.writings:
            for name in names.get(memory, ()):
                self.note_user(name, record)

    # --- backward -----------------------------------------------------------------------------------------

    def backward(
        self, tensors: Tensors, grads: Gradients = None, keep: bool = False, scale: float = 1.0
    ) -> None:
        """Run the backward pass and time each node, with what autograd does before it: it adds up gradients.

        See ``thread_settings.BackwardTaker``.
        """
        roots, given = root_gradients(tensors, grads, scale)
        begun = self.now()
        self.went_backward = True
        places = [at for at, _, _ in self.events]
        for node in graph_nodes(roots):
            number = number_of(node)
            if number >= LEAF_NUMBER:
                self.snapshot.set_aside(node)  # AccumulateGrad
                continue
            at = bisect.bisect_right(places, number) - 1
            record, order = self.events[at][1:] if at >= 0 else (self.top, 0.0)
            node.register_hook(lambda _, __, record=record, order=order: self._count_backward(record, order))
        self.going_back = True
        try:
            then = self._at_once if self.tasks is None else self.tasks.append
            inputs = () if keep else take_weights(roots, then, at_once=self.tasks is None)
            self.reached = self.now()  # what went before belongs to no module
            run_autograd(roots, given, inputs, keep)
        finally:
            self.going_back = False
            took = self.now() - begun
            self.children_s[0] += took
            self.since += took

    def note_recomputed(self, result: Any, args: Any) -> Any:
        """``result``, of an operation in a backward pass: what an activation checkpoint computes again is counted."""
        if torch.is_grad_enabled():
            given = {id(each) for each in args}
            new = [each for each in tensors_in(result) if base_of(each) is None and id(each) not in given]
            self.recomputed_bytes += sum(each.nbytes for each in new)
        return result

    def take_gradient(self, parameter: Tensor) -> None:
        """Drop a parameter's new gradient, and time what adding it to an earlier one would take.

        From its second microbatch on a step adds gradients up. Adding the parameter takes as long.
        """
        grad, parameter.grad = parameter.grad, None
        name = self.own.get(id(parameter), "")
        if grad is None or grad.layout != torch.strided or grad.dtype != parameter.dtype or not name:
            return
        if not self.going_back:  # inside of a forward pass
            self.reached = self.now()
        with torch.no_grad():
            grad.add_(parameter)
        record = self.records[name.rpartition(".")[0]]
        self._count_backward(record, record.parameters_used.get(id(parameter), record.order))

    def _at_once(self, task: Task) -> None:
        """Add a weight's gradient to a gradient that is there, as a step does from its second microbatch on."""
        before = self.now()
        parameter = task.parameter
        parameter.grad = parameter.detach().clone()
        self.reached += self.now() - before
        task.add()
        task.drop()
        parameter.grad = None

    def _count_backward(self, record: Record, order: float) -> None:
        """Count what the backward pass did since the last call of this for that part of ``record``."""
        now = self.now()
        record.backward_s += now - self.reached
        record.share(order).backward_s += now - self.reached
        self.reached = now
        if self.recomputed_bytes:  # for the node that has run now: the last one of the checkpoint's
            record.recomputed_bytes = max(record.recomputed_bytes, self.recomputed_bytes)
            self.recomputed_bytes = 0
