"""A unit's call: the whole module runs on the rank that owns it, and nowhere else.

Forward hooks of the unit itself are glue: they run on every rank, on tensors with places, so that what they
do (collect outputs, say) is done everywhere. With backward hooks on it, all its hooks run with it.

``attach`` puts the interceptor where ``nn.Module.__call__`` looks for a compiled version of the module: it comes
before the module's hooks, needs no subclass, and copying or pickling the module leaves it behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.errors import UsageError
from weft.torch.backward.offload import offloading
from weft.torch.backward.weight_gradients import large
from weft.torch.calls.attributes import Given
from weft.torch.calls.call_signature import ONE, scan
from weft.torch.execution.glue import Glue, running, running_here, settings
from weft.torch.execution.gradients import check_hidden
from weft.torch.pytorch.private import (
    HOOKS,
    SLOT,
    call_of,
    count_modes,
    forward_hooks,
    forward_pre_hooks,
    has_backward_hooks,
    has_forward_hooks,
    is_compiled,
    no_torch_function,
    pop_mode,
    push_mode,
    refuse,
)
from weft.torch.session.pipeline import Pipeline
from weft.torch.tensors.nested import fillable_in, has_objects, opaque_objects, replace

log = logging.getLogger("weft")
FLOATING = -1
UNUSUAL = object()


class UnitCall:
    """Stands for ``module.__call__``.

    ``owner``: the partition, or FLOATING for a module without state, which runs where its newest argument is
    (everywhere, if none has a place). ``writes``: how often a microbatch calls it, if it is known to write its buffers.
    ``stage``: the stage it belongs to; a partition may have several. ``spots``: attributes in it that others set;
    ``toggled``: its parameters of which the step says whether they need gradients.
    ``traced``: whether the trace has called it, so that one knows what it fills and writes.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        owner: int,
        pipeline: Pipeline,
        writes: int,
        stage: int,
        traced: bool,
    ) -> None:
        self.traced = traced
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
        self.compiled = is_compiled(module) or hasattr(module, "_orig_mod")
        self.told = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        glue = running()
        if glue is None:
            return self._outside(args, kwargs)
        module = self.module
        if has_forward_hooks(module) and not has_backward_hooks(module):
            return with_hooks(module, self._call_forward, args, kwargs)
        return self._call(glue, self.inner, args, kwargs)

    def _call_forward(self, *args: Any, **kwargs: Any) -> Any:
        glue = running()
        assert glue is not None
        return self._call(glue, self.module.forward, args, kwargs)

    def _call(
        self, glue: Glue, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        program = glue.program
        if (
            len(args) == 1
            and not kwargs
            and type(args[0]) is Tensor
            and not (program.checkpointing or self.spots or self.toggled)
        ):
            result = self._usual(glue, inner, args[0])
            if result is not UNUSUAL:
                return result
        if not self.traced:
            self._refuse_filling((*args, *kwargs.values()))
        with no_torch_function():
            parts: list[Any] = [self, self.serial, self.module.training, *settings()]
            tensors: list[Tensor] = []
            hidden: list[Tensor] = []
            if self.toggled:
                parts.append(tuple(parameter.requires_grad for parameter in self.toggled))
            scan(args, parts, tensors, hidden)
            if kwargs:
                scan(kwargs, parts, tensors, hidden)
            given = Given(self.spots)
            inputs = (args, kwargs, given.tensors)
            if self.spots:
                scan(given.tensors, parts, tensors, hidden)
            placed = [
                (tensor, value)
                for tensor in (*tensors, *hidden)
                if (value := program.value_of(tensor)) is not None
            ]
            if len(placed) < len(tensors) + len(hidden):
                for tensor in (*tensors, *hidden):
                    if tensor.device.type == "meta" and program.value_of(tensor) is None:
                        glue.refuse_meta(tensor)
            owner = self.owner
            if owner == FLOATING and placed:
                owner = program.newest_owner(placed)
            if owner != FLOATING and len(placed) != len(tensors) + len(hidden):
                program.share(tensors, owner)
                if hidden and owner == program.rank and tuple(parts) not in program.pipeline.specs:
                    check_hidden(self.name, hidden, program)
            key = tuple(parts)
            if owner not in (FLOATING, program.rank):
                call = program.next_call(key)
                program.module = self.name
                program.send_all(placed, owner)
                spec = program.spec_for(key, self.name, owner, call)
                return program.stand_ins(spec, owner, tensors, inputs)
        if owner == FLOATING:
            return inner(*args, **kwargs)
        again = program.checkpointing and torch.is_grad_enabled() and self._may_run_again((args, kwargs))

        def run(local: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                with given.replaced(local[2]):
                    return inner(*args, **kwargs)

            program.enter(self.name)
            before = None if self.traced or key in program.pipeline.specs else self._attributes()
            if before is not None:
                result = (forward if given.tensors else inner)(*local[0], **local[1])
                self._tell_written(before)
                return result
            called = forward if given.tensors else inner
            if again:
                with offloading():
                    return checkpoint(called, *local[0], use_reentrant=False, **local[1])
            return called(*local[0], **local[1])

        originals: dict[int, tuple[Tensor, Tensor]] = {}

        def localise(inputs: Any, transform: Callable[[Tensor], Tensor]) -> Any:
            local = replace(inputs, transform)
            originals.update((id(new := transform(tensor)), (tensor, new)) for tensor in hidden)
            if self.stateful:  # its buffers are to see the microbatches in order
                program.microbatch.follow(self.name, self.writes)
            return local

        with glue.lifted():
            call = program.next_call(key)
            program.module = self.name
            if owner == self.owner:
                program.tape.enter_stage(self.stage)
            result = program.run_here(key, self.name, call, run, tensors, inputs, localise)
            program.module = ""
            if originals and not again:  # objects hold again what has a place on every rank
                replace((args, kwargs), lambda tensor: originals.get(id(tensor), (tensor,))[0])
            if self.stateful:
                program.microbatch.passed(self.name)
        return result

    def _refuse_filling(self, arguments: Any) -> None:
        found = fillable_in(arguments)
        if found:
            raise UsageError(
                f"{self.name} was not called in the first microbatch of the first step, where weft sees what a module "
                f"does with its arguments. It gets a {type(found[0]).__name__}, and other ranks would not see what it "
                "puts in there: let the first microbatch call it (weft.is_tracing() tells), or keep what calls it in "
                "one piece with weft.set_partition(module, index)"
            )

    def _attributes(self) -> list[tuple[str, dict[str, Any]]]:
        """What its modules hold, but for parameters, buffers and modules."""
        return [
            (name, {key: value for key, value in vars(module).items() if not key.startswith("_")})
            for name, module in self.module.named_modules()
        ]

    def _tell_written(self, before: list[tuple[str, dict[str, Any]]]) -> None:
        """Warn of attributes that a call has written, of a module of which only this call tells."""
        for (name, old), (_, new) in zip(before, self._attributes(), strict=False):
            written = [key for key, value in new.items() if key not in old or old[key] is not value]
            if written:
                log.warning(
                    "%s was not called in the first microbatch of the first step, and writes its attributes %s: what "
                    "other ranks read there is old", f"{self.name}.{name}".strip("."), ", ".join(written),
                )  # fmt: skip

    def _may_run_again(self, inputs: Any) -> bool:
        """Whether an activation checkpoint can run it again: an object that it is given may have changed by then."""
        if not has_objects(inputs):
            return True
        if not self.told:
            self.told = True
            log.warning(
                "%s is in an activation checkpoint and gets an object (%s). Run again, it would find it as it is by "
                "then, so it is not run again, and keeps what its backward pass needs", self.name or "the model",
                ", ".join(sorted({type(thing).__name__ for thing in opaque_objects(inputs)})),
            )  # fmt: skip
        return False

    def _usual(self, glue: Glue, inner: Callable[..., Any], tensor: Tensor) -> Any:
        """The call as most are, with one tensor and a plain result that is known; ``UNUSUAL`` if it is none.

        It does what the rest of :meth:`_call` does for it with half of the calls: between kernels that have emptied the
        caches, Python is three times as slow as in a loop of its own.
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
                return program.stand_in(spec.description[1], owner)
            if key not in program.pipeline.told or self.stateful:
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

    def _outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call inside another unit, or again in the backward pass of an activation checkpoint."""
        if self.owner not in (FLOATING, self.pipeline.rank):
            raise UsageError(
                f"{self.name} lives on partition {self.owner} and was called on partition {self.pipeline.rank} outside "
                "of a step: call the model inside a function decorated with @weft.step"
            )
        args, kwargs = replace((args, kwargs), data_of)
        return self.inner(*args, **kwargs)


def with_hooks(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``nn.Module.__call__``'s protocol for a module's own forward hooks, around another ``forward``."""
    refuse(HOOKS)
    for hook, takes_kwargs in forward_pre_hooks(module):
        if takes_kwargs:
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = forward(*args, **kwargs)
    for after, takes_kwargs in forward_hooks(module):
        if takes_kwargs:
            changed = after(module, args, kwargs, result)
        else:
            changed = after(module, args, result)
        if changed is not None:
            result = changed
    return result


def data_of(tensor: Tensor) -> Tensor:
    """The data behind a stand-in that this rank has received."""
    value = tensor._weft_value  # type: ignore[attr-defined]
    if value is None:
        return tensor
    if value.copy is not None:
        return value.copy
    return value.data(tensor)


def attach(
    module: nn.Module, name: str, owner: int, pipeline: Pipeline, writes: int = 0, stage: int | None = None,
    traced: bool = True,
) -> None:  # fmt: skip
    """Intercept calls of ``module``, a unit called ``name``; see :class:`UnitCall`."""
    module.__dict__[SLOT] = UnitCall(
        module, name, owner, pipeline, writes, owner if stage is None else stage, traced
    )


def unit_call(module: nn.Module) -> UnitCall:
    """What :func:`attach` has put there."""
    call = module.__dict__[SLOT]
    assert isinstance(call, UnitCall)
    return call


def detach(module: nn.Module) -> None:
    """Undo :func:`attach`."""
    call = module.__dict__.get(SLOT)
    if isinstance(call, UnitCall):
        del module.__dict__[SLOT]
