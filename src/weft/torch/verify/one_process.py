"""A step as one process runs it: the reference that the first step of a split model is compared with.

Every microbatch runs whole, one after the other, on one rank. Nothing is sent and nothing has a place. Only the random
numbers are those of a split step: there units, and operations on what units have made, draw from streams of their own
(see ``random_streams``). So a tensor that would have a place in a split step is marked here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from weft.errors import UsageError
from weft.torch.backward.autograd import graph_nodes, run_autograd
from weft.torch.calls.call_signature import function_name, scan
from weft.torch.calls.container_writes import Contents
from weft.torch.calls.interception import intercepted
from weft.torch.execution.glue import Glue, running
from weft.torch.execution.gradients import pair_gradients, root_gradients
from weft.torch.execution.unit_call import FLOATING, UnitCall
from weft.torch.pytorch import torch_functions
from weft.torch.pytorch.private import (
    any_autocast,
    dtypes_of,
    has_backward_hooks,
    has_forward_hooks,
    no_torch_function,
)
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, Streams, call_seed, mix, same_states
from weft.torch.tensors.pytree import map_tensors, tensors_in
from weft.torch.trace.compiled import without_modes
from weft.torch.trace.dry_run import Snapshot
from weft.torch.verify.fingerprint import Fingerprint, fingerprint, fingerprints
from weft.torch.verify.lender import Lender

ANOTHER = "the step uses a model that an earlier step has split"
ALL = TORCH | PYTHON | NUMPY
CHANCE = (
    "drop", "rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "geometric", "cauchy", "poisson",
    "gumbel", "rrelu", "attention", "fractional", "sample", "lstm", "gru", "rnn",
)  # fmt: skip
"""Parts of the names of PyTorch's functions that may draw random numbers. Of others the first call shows it."""


class Alone:
    """One microbatch of the reference; stands in the place of a ``Program``.

    ``lent``: the ids of tensors that are borrowed from other ranks; ``lender``: brings those of a unit when it runs.
    ``units``: for each call of a unit (name, number of the call), in order, the fingerprints of what the unit was given
    and of what it returned. ``given``: the fingerprints of the tensors that backward passes began at. ``whole``:
    backward passes run, and gradients add up in ``.grad``. ``asked``: whether something looked at what a backward pass
    does.
    """

    def __init__(
        self, streams: Streams, seed: int, index: int, whole: bool, snapshot: Snapshot, lent: Collection[int],
        lender: Lender | None = None,
    ) -> None:  # fmt: skip
        self.checkpointing = False
        self.scale = 1.0
        self.whole = whole
        self.asked = False
        self.units: dict[tuple[str, int], tuple[list[Fingerprint], list[Fingerprint]]] = {}
        self.given: list[Fingerprint | None] = []
        self.dtypes: set[torch.dtype] = set()
        self.snapshot = snapshot
        self._lent = lent
        self._lender = lender
        self._streams = streams
        self._seed = seed
        self._index = index
        self.drawn: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The tensor itself, if it would have a place in a split step."""
        owner = tensor._weft_owner  # type: ignore[attr-defined]
        if owner and id(tensor) not in self._lent:
            raise UsageError(ANOTHER)
        return tensor if owner is not None or tensor._weft_placed else None  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        raise UsageError(ANOTHER)  # only a unit of a model that is not compared asks for more of its program

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> list[Fingerprint]:
        """Run the microbatch; the fingerprints of what it returns."""
        self._streams.seed(mix(self._seed, self._index))
        with AloneGlue(self) as glue:
            result = function(*args, **kwargs)
            with glue.lifted():
                return fingerprints(result)

    def run_with_own_stream(self, name: str, run: Callable[[], Any]) -> tuple[Any, bool]:
        """The result of ``run``, which draws from a stream of its own, and whether it drew; from the microbatch's where
        the step has set its seed."""
        streams = self._streams
        if streams.is_seeded_anew(mix(self._seed, self._index)):
            before = streams.capture(ALL)
            result = run()
            return result, not same_states(before, streams.capture(ALL))
        seed = call_seed(self._seed, self._index, name, self.drawn)
        with streams.own(seed, ALL):
            result = run()
            drew = streams.has_drawn_since(seed, ALL)
        if drew:
            self.drawn[name] = self.drawn.get(name, 0) + 1
        return result, drew

    def unit(self, label: str, call: UnitCall, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a unit, with nothing intercepted inside; its result."""
        number = self._calls[label] = self._calls.get(label, 0) + 1
        contents = Contents((*args, *kwargs.values()))

        def run() -> Any:
            with nullcontext() if self._lender is None else self._lender.around(call.module):
                if self.checkpointing and torch.is_grad_enabled() and not contents.things:
                    return checkpoint(inner, *args, use_reentrant=False, **kwargs)
                return inner(*args, **kwargs)

        if any_autocast():
            self.dtypes |= {
                torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
            }
        if call.compiled:
            inner = without_modes(inner)
        before = fingerprints((args, kwargs))
        held, known = {id(tensor) for tensor in contents.tensors}, ids_in((args, kwargs))
        result = self.run_with_own_stream(call.name, run)[0]
        result = contents.find(mark(contents.refer(result), known))
        for tensor in Contents((*args, *kwargs.values())).tensors:
            if id(tensor) not in held and tensor._weft_owner is None:  # type: ignore[attr-defined]
                _mark(tensor)
        if call.owner != FLOATING:
            self.units[label, number] = before, fingerprints(result)
        return result

    def backward(self, tensors: Any, grads: Any, keep: bool) -> None:
        """A backward pass; only noted unless its gradients are wanted."""
        several, _ = pair_gradients(tensors, grads)
        self.given += [fingerprint(tensor) for tensor in several]
        self.dtypes |= {kind for node in graph_nodes(several) for kind in dtypes_of(node)}
        if not self.whole:
            return
        roots, given = root_gradients(tensors, grads, self.scale)
        for node in graph_nodes(roots):
            self.snapshot.set_aside(node)
        run_autograd(roots, given, keep=keep)


class AloneGlue(Glue):
    """The torch-function mode of such a microbatch outside of units: tensors with a place are found as in ``Glue``."""

    program: Any
    _calm: set[Any] = set()
    """Functions that drew nothing when they were first called."""

    def __init__(self, alone: Alone) -> None:
        TorchFunctionMode.__init__(self)  # there is no tape that could put parts together
        self.program = alone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in torch_functions.GRADIENTS or func is Tensor.register_hook:
            self.program.asked = True
        return super().__torch_function__(func, types, args, kwargs)

    def backward(self, tensors: Any, grads: Any = None, keep: bool = False, scale: float = 1.0) -> None:
        self.program.scale = scale
        with self.aside():
            self.program.backward(tensors, grads, keep)

    def from_first(self, inputs: Any) -> Any:
        """Marked inputs: what only the pipeline's first rank has would be values of that rank."""
        return map_tensors(inputs, lambda tensor: _mark(tensor.view_as(tensor)))

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self.lifted():
            placed: list[Any] = []
            self._find((*args, *kwargs.values()), placed)
            if placed:
                return self._operate(func, args, kwargs, placed)
        return func(*args, **kwargs)

    def _metadata(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _operate(self, func: Any, args: Any, kwargs: Any, placed: list[Any]) -> Any:
        if func in torch_functions.BACKWARD:
            return self._autograd(func, args, kwargs, placed)
        if func in torch_functions.READS or func in torch_functions.LIKE:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            return iter(self._operate(Tensor.unbind, args, {}, placed))
        result = self._run(func, functools.partial(func, *args, **kwargs))
        targets = torch_functions.targets(func, args, kwargs)
        if not targets:
            return mark(result, ids_in((args, kwargs)))
        for target in targets:
            if target._weft_owner is None:  # type: ignore[attr-defined]
                _mark(target)
        return result

    def _run(self, func: Any, run: Callable[[], Any]) -> Any:
        if func in self._calm:
            return run()
        name = function_name(func)
        result, drew = self.program.run_with_own_stream(name, run)
        if not drew and name.startswith("torch.") and not any(part in name.lower() for part in CHANCE):
            self._calm.add(func)
        return result


def ids_in(inputs: Any) -> set[int]:
    """The ids of the tensors among a call's arguments."""
    return {id(tensor) for tensor in tensors_in(inputs)}


def mark(result: Any, known: set[int]) -> Any:
    """``result`` with its tensors marked as having a place. One that was among the inputs, whose ids these are, gives
    a view instead."""

    def one(tensor: Tensor) -> Tensor:
        if tensor._weft_placed or tensor._weft_owner is not None:  # type: ignore[attr-defined]
            return tensor
        return _mark(tensor.view_as(tensor) if id(tensor) in known else tensor)

    return map_tensors(result, one)


def _mark(tensor: Tensor) -> Tensor:
    tensor._weft_placed = True  # type: ignore[attr-defined]
    return tensor


class AloneCall:
    """The call of a unit in such a run, in place of its ``UnitCall``: every unit runs here."""

    def __init__(self, label: str, call: UnitCall) -> None:
        self.label = label
        self.call = call
        self.module = call.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(running(), AloneGlue):
            return self.call.inner(*args, **kwargs)  # in another unit, or again in a backward pass
        if has_forward_hooks(self.module) and not has_backward_hooks(self.module):
            return self.call.inside_glue_hooks(self._run, args, kwargs)
        return self._run(self.call.inner, *args, **kwargs)

    def _run(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        glue = running()
        assert isinstance(glue, AloneGlue)
        with no_torch_function():
            tensors: list[Tensor] = []
            scan((args, kwargs), [], tensors)
            tensors += Contents((*args, *kwargs.values())).tensors
            placed = any(glue.program.value_of(tensor) is not None for tensor in tensors)
        if self.call.owner == FLOATING and not placed:
            return inner(*args, **kwargs)
        with glue.lifted():
            return glue.program.unit(self.label, self.call, inner, args, kwargs)


def run_units_here(units: Mapping[str, UnitCall]) -> AbstractContextManager[None]:
    """Inside, units run here, whoever owns them."""
    return intercepted([(call.module, AloneCall(label, call)) for label, call in units.items()])
