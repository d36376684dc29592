"""A unit's call: the whole module runs on the rank that owns it, and nowhere else.

Forward hooks of the unit itself are glue: they run on every rank, on placed tensors, so that what they
do (collect outputs, say) is done everywhere. Those that write what the unit computes with run with it
(``calls.own_hooks``). With backward hooks on it, all its hooks run with it.

``attach`` intercepts a module's calls, see ``calls.interception``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.errors import UsageError
from weft.torch.backward.weight_gradients import large
from weft.torch.calls.attributes import Given, note_attributes, spot_of, written_values
from weft.torch.calls.call_signature import ONE, scan
from weft.torch.calls.container_writes import Change, Contents, Filled, fills, outside, written_by
from weft.torch.calls.interception import intercept, interceptor_of, with_hooks
from weft.torch.calls.own_hooks import find_hooks
from weft.torch.calls.placeholders import Left
from weft.torch.execution.glue import Glue, running, running_here, settings
from weft.torch.execution.gradients import check_hidden
from weft.torch.execution.program import Signature
from weft.torch.execution.value import Value
from weft.torch.pytorch.private import (
    call_of,
    count_modes,
    has_backward_hooks,
    has_forward_hooks,
    is_compiled,
    no_torch_function,
    pop_mode,
    push_mode,
    version,
)
from weft.torch.session.pipeline import Pipeline
from weft.torch.tensors.marks import unwritten
from weft.torch.tensors.pytree import has_objects, map_tensors, opaque_objects
from weft.torch.tensors.shards import stays_sharded

log = logging.getLogger("weft")
FLOATING = -1
UNUSUAL = object()
NOTHING_GIVEN = Given(())


class UnitCall:
    """Stands for ``module.__call__``.

    ``owner``: the partition, or FLOATING for a module without state, which runs where its newest argument is
    (everywhere, if none has a place). ``writes``: above 0 if it is known to leave something to the next microbatch.
    ``stage``: the stage it belongs to; a partition may have several. ``spots``: attributes in it that others set;
    ``toggled``: its parameters of which the step says whether they need gradients. ``traced``: whether the trace has
    called it, so that one knows what it writes. ``reads``: whether it may use what other units have left in containers
    and objects. ``hooks``: the names of its forward hooks that run with it.
    """

    def __init__(
        self, module: nn.Module, name: str, owner: int, pipeline: Pipeline, writes: int, stage: int, traced: bool,
        reads: bool = True, hooks: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.traced = traced
        self.reads = reads
        self.module = module
        self.name = name
        self.owner = owner
        self.pipeline = pipeline
        self.writes = writes
        self.stage = stage
        self.stateful = writes > 0 or next(module.buffers(), None) is not None
        self.spots: list[tuple[dict[str, Any], str]] = []
        self.toggled: list[nn.Parameter] = []
        self.serial = pipeline.next_serial()
        if owner in (FLOATING, pipeline.rank) and pipeline.device.type == "cpu":
            pipeline.fuses |= any(map(large, module.parameters()))
        self.inner = call_of(module)
        self.compiled, *inside = (is_compiled(one) or hasattr(one, "_orig_mod") for one in module.modules())
        self.compiled_inside = any(inside)
        self.warned = False
        self.hooks = find_hooks(module, hooks)
        self.around: Callable[..., Any] | None = None
        """Runs the unit's code, which it is given with its arguments; None: nobody has anything to do around it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        glue = running()
        if glue is None:
            return self._outside(args, kwargs)
        module = self.module
        if has_forward_hooks(module) and not has_backward_hooks(module):
            return self.inside_glue_hooks(self._call_forward, args, kwargs)
        return self._call(glue, self.inner, args, kwargs)

    def inside_glue_hooks(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the hooks that are glue around ``call``, which is given what runs in the unit, and its arguments."""
        forward: Callable[..., Any] = self.module.forward
        if not self.hooks:
            return with_hooks(self.module, functools.partial(call, forward), args, kwargs)
        forward = functools.partial(self._with_own_hooks, forward)
        return with_hooks(
            self.module, functools.partial(call, forward), args, kwargs, lambda hook: not self._is_own(hook)
        )

    def _with_own_hooks(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return with_hooks(self.module, forward, args, kwargs, self._is_own)

    def _is_own(self, hook: Callable[..., Any]) -> bool:
        return any(hook is each for each in self.hooks)

    def _call_forward(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        glue = running()
        assert glue is not None
        return self._call(glue, forward, args, kwargs)

    def _call(
        self, glue: Glue, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.around is not None:
            inner = functools.partial(self.around, inner)
        if (
            len(args) == 1
            and not kwargs
            and type(args[0]) is Tensor
            and not (glue.program.checkpointing or self.spots or self.toggled)
        ):
            result = self._call_quickly(glue, inner, args[0])
            if result is not UNUSUAL:
                return result
        return PlainCall(self, glue, inner, args, kwargs).result()

    def _call_quickly(self, glue: Glue, inner: Callable[..., Any], tensor: Tensor) -> Any:
        """The result of a call as most are: one tensor, and one new tensor whose shape is known; else ``UNUSUAL``.

        It does what :class:`PlainCall` does, which is the reference, with half of Python's calls: between kernels that
        have emptied the caches, Python is three times as slow as in a loop of its own.
        """
        if count_modes() != 1:
            return UNUSUAL  # there are modes of the user, too
        program = glue.program
        pop_mode()
        try:
            value = program.value_of(tensor)
            if value is None and tensor.requires_grad:
                return UNUSUAL
            seen = tensor if value is None else value.data(tensor)
            key = (self, self.serial, self.module.training, *settings(), ONE, seen.shape, seen.dtype)
            spec = program.pipeline.specs.get(key)
            if spec is None or not spec.plain:
                return UNUSUAL
            owner = self.owner
            if owner == FLOATING:
                if value is None:
                    return UNUSUAL
                owner = value.owner
            if owner != program.rank:
                program.log.append(key)
                program.module = self.name
                if value is not None and value.owner == program.rank:
                    program.tape.send(value, tensor, owner, self.name)
                program.microbatch.take_turns()
                return program.placeholder(spec.description[1], owner)
            if key not in program.pipeline.announced or self.stateful or program.microbatch.is_new:
                return UNUSUAL
            running_here.glue = None
            program.log.append(key)
            program.module = self.name
            if owner == self.owner:
                program.tape.enter_stage(self.stage)
            local = tensor if value is None else program.local(tensor, value)
            program.enter(self.name)
            result = program.place_results(inner(local), [tensor], {id(tensor): local}, spec, self.name, None)
            program.module = ""
            return result
        finally:
            push_mode(glue)
            running_here.glue = glue

    def run_noted(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Run the unit, for the first time with such arguments: its result, and what other ranks are to know of its
        attributes. Warns of those that they cannot know."""
        if self.compiled or self.compiled_inside:  # the compiler would see the notes
            return forward(*args, **kwargs), {}
        with note_attributes(self.module, lambda: "") as noted:
            result = forward(*args, **kwargs)
        if any(each.in_order and not each.lazy for each in noted):  # from now on microbatches come in order
            self.stateful, self.writes = True, max(1, self.writes)
        written = written_values(self.module, noted)
        old = [each for each in noted if not self.traced and f"{each.module}.{each.name}" not in written]
        if old:
            log.warning(
                "%s was not called in the first microbatch of the first step, and writes its attributes %s: what other "
                "ranks read there is old", self.name,
                ", ".join(f"{each.module}.{each.name}".strip(".") for each in old),
            )  # fmt: skip
        return result, written

    def keep(self, written: dict[str, Any]) -> None:
        """Let its attributes be what a call has written, as this rank has it; each microbatch has its own."""
        for name, value in written.items():
            attributes, attribute = spot_of(self.module, name)
            self.pipeline.own.add(attributes, attribute)
            attributes[attribute] = value

    def versions(self) -> list[tuple[int, int]]:
        """Its buffers, and how often each was written."""
        return [(id(buffer), version(buffer)) for buffer in self.module.buffers()]

    def has_written(self, before: list[tuple[int, int]]) -> bool:
        """True if it has written into its buffers since they were as ``before``, or what it writes is no buffer."""
        return self.versions() != before if before else self.writes > 0

    def may_run_again(self, inputs: Any) -> bool:
        """True if an activation checkpoint can run the unit again: an object that it gets may have changed by then."""
        if not has_objects(inputs):
            return True
        if not self.warned:
            self.warned = True
            log.warning(
                "%s is in an activation checkpoint and gets an object (%s). Run again, it would find it as it is by "
                "then, so it is not run again, and keeps what its backward pass needs", self.name or "the model",
                ", ".join(sorted({type(thing).__name__ for thing in opaque_objects(inputs)})),
            )  # fmt: skip
        return False

    def _outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call inside another unit, or again in the backward pass of an activation checkpoint."""
        if self.owner not in (FLOATING, self.pipeline.rank):
            raise UsageError(
                f"{self.name} lives on partition {self.owner} and was called on partition {self.pipeline.rank} outside "
                "of a step: call the model inside a function decorated with @weft.step"
            )
        args, kwargs = map_tensors((args, kwargs), received_data, attributes=True)
        if self.around is not None:
            return self.around(self.inner, *args, **kwargs)
        return self.inner(*args, **kwargs)


class PlainCall:
    """One call of a unit by glue, whatever the unit gets and returns: steps 1 to 3 of ``program``."""

    key: Signature
    """The call's signature."""
    again: bool
    """Whether an activation checkpoint runs the unit again in the backward pass."""

    def __init__(
        self, unit: UnitCall, glue: Glue, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:  # fmt: skip
        self.unit = unit
        self.glue = glue
        self.program = glue.program
        self.inner = inner
        self.given = Given(unit.spots) if unit.spots else NOTHING_GIVEN
        self.inputs = (args, kwargs, self.given.tensors)
        self.tensors: list[Tensor] = []
        self.hidden: list[Tensor] = []
        """Tensors in objects; they have no numbers in the signature."""
        self.away: dict[int, Tensor] = {}
        """By id what other units have left and this one does not use: it stays where it is, and is not sent."""
        self.contents = Contents((*args, *kwargs.values()), self._passes_by())
        self.held: list[Tensor] = []
        """The hidden tensors as this rank has them."""
        self.versions: list[tuple[int, int]] = []
        """Of the unit's buffers, before it runs."""

    def _passes_by(self) -> Callable[[Tensor], bool] | None:
        """Says of a tensor that another unit has left it, and this one does not use such: so a call in a deep model
        does not look through the whole cache of all layers.

        The first call in a microbatch that is given such looks at all, and shows whether the unit writes there. With
        gradients all calls do, as activation checkpoints need it.
        """
        unit, program = self.unit, self.program
        if unit.reads or torch.is_grad_enabled() or not program.keeps_apart.get(unit.serial):
            return None
        return self._is_of_another

    def _is_of_another(self, tensor: Tensor) -> bool:
        """True if another unit has left the tensor."""
        value, serial = self.program.value_of(tensor), self.unit.serial
        return value is not None and self.program.left.get(value.number, serial) != serial

    def _note_writes(self, changes: Sequence[Change]) -> None:
        """Note whether the call has written into things that hold what other units have left."""
        contents, apart, serial = self.contents, self.program.keeps_apart, self.unit.serial
        if contents.passed_by or not any(map(self._is_of_another, contents.tensors)):
            return
        written = (each for number, _ in changes for each in contents.tensors_in(number))
        apart[serial] = apart.get(serial, True) and not any(map(self._is_of_another, written))

    def result(self) -> Any:
        """Make the call: what the unit returns on this rank, or placeholders for what it returns on another one."""
        unit, program = self.unit, self.program
        with no_torch_function():
            parts = self._scan()
            placed, owner = self._find_placed(parts)
            self.key = tuple(parts)
            if owner != FLOATING and len(placed) != len(self.tensors) + len(self.hidden):
                self._share(owner)
            if owner not in (FLOATING, program.rank):
                call = program.next_call(self.key)
                program.module = unit.name
                program.send_all(placed, owner)
                spec = program.spec_for(self.key, unit.name, owner, call)
                return self._filled(program.placeholders_for(spec, owner, self.tensors, self.inputs))
        if owner == FLOATING:
            return self.inner(*self.inputs[0], **self.inputs[1])
        with self.glue.lifted():
            return self._run_here()

    def _scan(self) -> list[Any]:
        """Find the tensors; what the signature consists of."""
        unit = self.unit
        args, kwargs, given = self.inputs
        parts: list[Any] = [unit, unit.serial, unit.module.training, *settings()]
        if unit.toggled:
            parts.append(tuple(parameter.requires_grad for parameter in unit.toggled))
        scan(args, parts, self.tensors)
        if kwargs:
            scan(kwargs, parts, self.tensors)
        if unit.spots:
            scan(given, parts, self.tensors)
        if self.contents.things:
            parts.append((Contents, self.contents.signature()))
            known = {id(tensor) for tensor in self.tensors}
            self.hidden = [tensor for tensor in self.contents.tensors if id(tensor) not in known]
        return parts

    def _find_placed(self, parts: list[Any]) -> tuple[list[tuple[Tensor, Value]], int]:
        """The tensors that have a place, and the partition that runs the call; notes what need not be sent there."""
        unit, program, tensors = self.unit, self.program, (*self.tensors, *self.hidden)
        placed = [(tensor, value) for tensor in tensors if (value := program.value_of(tensor)) is not None]
        if len(placed) < len(tensors):
            for tensor in tensors:
                if tensor.device.type == "meta" and program.value_of(tensor) is None:
                    self.glue.refuse_meta(tensor)
        self._leave_out(placed)
        if self.away:
            places = tuple(number for number, tensor in enumerate(tensors) if id(tensor) in self.away)
            parts.append((Left, places))
            placed = [(tensor, value) for tensor, value in placed if id(tensor) not in self.away]
            self.tensors = [tensor for tensor in self.tensors if id(tensor) not in self.away]
            self.hidden = [tensor for tensor in self.hidden if id(tensor) not in self.away]
        owner = unit.owner
        if owner == FLOATING and placed:
            owner = program.placed.newest_owner(placed)
        return placed, owner

    def _leave_out(self, placed: list[tuple[Tensor, Value]]) -> None:
        """Note what other units have left in the things that the call gets, if the unit does not use such."""
        unit, left = self.unit, self.program.left
        if not left or unit.reads or not self.contents.things:
            return
        inside = {id(tensor) for tensor in self.contents.tensors}
        inside -= {id(each) for each in (*self.inputs[0], *self.inputs[1].values())}
        for tensor, value in placed:
            if id(tensor) in inside and left.get(value.number, unit.serial) != unit.serial:
                self.away[id(tensor)] = tensor

    def _share(self, owner: int) -> None:
        """Note the replicated tensors, which the unit uses on ``owner``."""
        program = self.program
        program.share(self.tensors, owner)
        if self.hidden and owner == program.rank and self.key not in program.pipeline.specs:
            check_hidden(self.unit.name, self.hidden, program)

    def _run_here(self) -> Any:
        """The unit's result; with nothing intercepted inside."""
        unit, program = self.unit, self.program
        self.again = program.checkpointing and torch.is_grad_enabled() and self._may_run_again()
        call = program.next_call(self.key)
        program.module = unit.name
        if unit.owner != FLOATING:
            program.tape.enter_stage(unit.stage)
        result = program.run_here(
            self.key, unit.name, call, self._run, self.tensors, self.inputs, self._localise
        )
        program.module = ""
        if unit.stateful or program.microbatch.is_new:
            program.microbatch.passed(unit.name, unit.stateful and unit.has_written(self.versions))
        return self._filled(result)

    def _may_run_again(self) -> bool:
        """True if an activation checkpoint may run the unit again. Containers that it fills would be filled twice; of
        lists and dicts it gets copies, since others may fill them meanwhile."""
        if not all(isinstance(thing, (list, dict)) for thing in self.contents.things):
            return False
        if self.contents.things:
            spec = self.program.pipeline.specs.get(self.key)
            if spec is None or fills(spec.description):
                return False
        return self.unit.may_run_again(self.inputs[:2])

    def _filled(self, filled: Any) -> Any:
        """The unit's own result, after what it has left is in the things that it was given and in its attributes."""
        if self.program.left and not self.unit.reads:
            self._note_writes(filled.changes if isinstance(filled, Filled) else ())
        if not isinstance(filled, Filled):
            return filled
        self.unit.keep(filled.written)
        if filled.changes:
            self.program.note_left(filled.changes, self.contents.things, self.unit.name, self.unit.serial)
            self.contents.apply(filled.changes)
        return self.contents.find(filled.result) if self.contents.things else filled.result

    def _localise(self, inputs: Any, transform: Callable[[Tensor], Tensor]) -> Any:
        """The inputs as this rank has them."""
        unit = self.unit

        def known(tensor: Tensor) -> Tensor:
            return tensor if id(tensor) in self.away and not self._is_beside(tensor) else transform(tensor)

        if self.contents.things and not self.again:
            args, kwargs, given = inputs
            local = (
                tuple(outside(each, known) for each in args),
                {name: outside(each, known) for name, each in kwargs.items()},
                [*map(known, given)],
            )
            self.contents.localise(
                known, lambda tensor: transform(tensor) if self._is_beside(tensor) else tensor
            )
            self.held = [*map(known, self.hidden), *self.away.values()]
        else:
            local = map_tensors(inputs, known, anew=self.again, attributes=True)
        if unit.stateful:  # what it keeps is to see the microbatches in order
            self.program.microbatch.follow(unit.name)
            self.versions = unit.versions()
        elif self.program.microbatch.is_new:
            self.program.microbatch.come(unit.name)
        return local

    def _is_beside(self, tensor: Tensor) -> bool:
        """True if this rank has what another unit has left, from before it turned to others: a later call may use it.

        Parts are not all-gathered for that.
        """
        value = self.program.value_of(tensor)
        return (
            value is not None and value.owner == self.program.rank and not stays_sharded(value.data(tensor))
        )

    def _run(self, local: Any) -> Any:
        """Run the unit on local inputs: its result, and where it was given containers what it has put there."""
        contents = self.contents
        if not contents.things:
            result, written = self._forward(local)
            return Filled(result, [], written) if written else result
        if self.again:
            contents = Contents((*local[0], *local[1].values()))
            result, written = self._forward(local)
            if self._changes(contents):
                raise UsageError(
                    f"{self.unit.name} in an activation checkpoint fills a container that it is given, and did not "
                    "when it was called with the same shapes before: call it without the checkpoint"
                )
            return Filled(result, [], written)
        contents.local()
        untouched = [
            unwritten(each) for each in (*self.held, *contents.beside()) if not isinstance(each, Left)
        ]
        try:
            result, written = self._forward(local)
            changes = self._changes(contents)
            filled_beside = contents.written_beside()
            filled = Filled(contents.refer(result), changes, written)
        finally:
            contents.restore()
        if filled_beside is not None:
            raise UsageError(
                f"{self.unit.name} writes into a {type(filled_beside).__qualname__} into which another module has put "
                "tensors, which the other ranks do not see, and did not do so when it was called before in this step: "
                "let each call do it, or keep both modules on one partition with weft.set_partition(module, index)"
            )
        if not all(as_before() for as_before in untouched):
            raise UsageError(
                f"{self.unit.name} writes in place into a tensor in an object that it is given, which the other ranks "
                "do not see, and did not do so in the first microbatch of the first step: let that microbatch do it, "
                "too, or hand the tensor over as an argument of its own"
            )
        return filled

    def _changes(self, contents: Contents) -> list[Any]:
        try:
            return contents.changes()
        except UsageError as error:
            raise UsageError(f"{self.unit.name} {error}") from None

    def _forward(self, local: Any) -> tuple[Any, dict[str, Any]]:
        """The unit's result, and what it has written into its attributes for the other ranks."""
        unit, program = self.unit, self.program
        args, kwargs, given = local
        forward = self.inner if not given else functools.partial(self._forward_with, given)
        program.enter(unit.name)
        if self.again:
            forward = functools.partial(self._checkpointed, forward)
        spec = program.pipeline.specs.get(self.key)
        if spec is None:
            return unit.run_noted(forward, args, kwargs)
        microbatch = program.microbatch
        if microbatch.is_new and not unit.stateful and microbatch.times.get(unit.name):
            # called again by a function that was not traced: does it keep anything from call to call?
            result, _ = unit.run_noted(forward, args, kwargs)
        else:
            result = forward(*args, **kwargs)
        spots = [(name, *spot_of(unit.module, name)) for name in written_by(spec.description)]
        return result, {name: attributes.get(attribute) for name, attributes, attribute in spots}

    def _checkpointed(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the unit so that an activation checkpoint can run it again."""
        with self.program.pipeline.offload():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def _forward_with(self, given: Sequence[Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Run the unit while its attributes that others set are ``given``."""
        with self.given.replaced(given):
            return self.inner(*args, **kwargs)


def received_data(tensor: Tensor) -> Tensor:
    """The data behind a placeholder that this rank has received."""
    value: Value | None = tensor._weft_value  # type: ignore[attr-defined]
    if value is None:
        return tensor
    if value.copy is not None:
        return value.copy
    return value.data(tensor)


def attach(
    module: nn.Module, name: str, owner: int, pipeline: Pipeline, writes: int = 0, stage: int | None = None,
    traced: bool = True, reads: bool = True, hooks: Iterable[str] = (),
) -> None:  # fmt: skip
    """Intercept calls of ``module``, a unit called ``name``; see :class:`UnitCall`."""
    stage = owner if stage is None else stage
    intercept(module, UnitCall(module, name, owner, pipeline, writes, stage, traced, reads, hooks))


def unit_call(module: nn.Module) -> UnitCall:
    """The unit call that :func:`attach` has put there."""
    call = interceptor_of(module)
    assert isinstance(call, UnitCall)
    return call
