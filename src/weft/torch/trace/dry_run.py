"""A dry run: the step of a script runs on this rank alone, and leaves nothing behind.

A step is run so before the first one of a job: to measure it, to try it on shards, to count what autograd keeps, to see
which rows its loss joins, as the reference that the first step is compared with. What it may change, and what keeps or
undoes that:

    arguments                                      the step gets copies, which are brought back
    buffers, attributes and mode of modules        ``Kept``
    closures, globals, containers, objects         ``Kept``
    parameters, of whatever module                 ``ParameterWrites``, once something writes into one
    gradients, ``requires_grad``                   ``Snapshot``, of whatever leaf a backward pass comes to
    random states of PyTorch, Python, NumPy        ``Snapshot``; those of the script's own generators: ``Kept``
    parameters that autocast has cast              ``Snapshot``: they may be of another value, or without a gradient
    what ``weft.is_tracing`` says                  ``dry_run``
    backward passes                                go to a ``Rehearsal``
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.torch.backward.autograd import Forget, leaf_of
from weft.torch.calls.placeholders import Placeholder
from weft.torch.execution.gradients import Gradients, Tensors
from weft.torch.execution.thread_settings import rehearsed
from weft.torch.pytorch.private import no_torch_function, storage_key
from weft.torch.pytorch.torch_functions import memory_written
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, Streams
from weft.torch.session.session import Session
from weft.torch.tensors.pytree import map_tensors
from weft.torch.trace.kept_state import Kept, homes_of
from weft.torch.trace.without_values import on_meta


@contextmanager
def dry_run(
    session: Session, models: Sequence[Any], function: Callable[..., Any], given: Any, activity: str = "trace",
    without_values: bool = False,
) -> Iterator[DryRun]:  # fmt: skip
    """The step ``function`` with its arguments ``given``, for runs inside.

    ``models``: those that the step may call, beside others that are not split yet. ``activity``: what the rank is said
    to do. ``without_values``: models and arguments are on the meta device.
    """
    others = [one for one in session.models if one not in models and not one.partitioned]
    modules = [model.module for model in (*models, *others)]
    run = DryRun(modules, session.streams, function, given, [model.module for model in session.models])
    session.monitor.note(activity, session.steps + 1)
    with session.rehearsing(), ExitStack() as stack:
        if without_values:
            run.given = map_tensors(run.given, on_meta_device)
            for module in modules:
                stack.enter_context(on_meta(module))
        try:
            yield run
        except BaseException as error:
            session.monitor.locate(error)
            raise


class DryRun:
    """A step that can be run without consequences.

    Args:
        modules: What gets gradients.
        streams: The random states of this process.
        function: What is run.
        given: Its arguments.
        others: Other modules that it may change.

    Attributes:
        given: A copy of the arguments.
    """

    def __init__(
        self, modules: Sequence[nn.Module], streams: Streams, function: Any = None, given: Any = (), others: Any = ()
    ) -> None:  # fmt: skip
        self.modules, self.streams, self.function, self.others = modules, streams, function, others
        self.given = map_tensors(given, copy_argument)

    def arguments(self) -> Any:
        """Views of the copied arguments, for one run."""
        return map_tensors(self.given, hand_to_step)

    def snapshot(self, *more: Any) -> Snapshot:
        """The state that the step, and what else is called, can reach, as it is now."""
        return Snapshot(self.modules, self.streams, self.function, self.given, *more, *self.others)

    @contextmanager
    def forward(self, run: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Inside, ``run`` without consequences and backward passes. What else is done there has no consequences either,
        as long as it writes into no parameter."""

        def once() -> Any:
            with self.snapshot().restored():
                return run()

        with self.snapshot().restored(watch=False), rehearsed(Forward()):
            yield once


def forget_grad(parameter: Tensor) -> None:
    """Drop a parameter's gradient: a trace needs none, so none takes memory until its end."""
    parameter.grad = None


class Snapshot:
    """The state of ``modules`` and of generators, and of what a ``function`` and other ``things`` reach.

    Attributes:
        kept: All but parameters and random states.
        writes: Sees what is written into parameters.
    """

    def __init__(
        self, modules: Sequence[nn.Module], streams: Streams, function: Any = None, *things: Any
    ) -> None:
        self.streams = streams
        self._states = streams.capture(TORCH | PYTHON | NUMPY)
        roots = [thing for thing in (*things, *modules) if isinstance(thing, nn.Module)]
        self.kept = Kept({home for root in roots for home in homes_of(function, root)})
        with no_torch_function():
            for thing in (function, *things, *modules):
                self.kept.note(thing)
            own = {id(parameter): parameter for module in modules for parameter in module.parameters()}
            known = {**self.kept.parameters, **own}.values()
            self._gradients = [(parameter, parameter.grad) for parameter in own.values()]
            self._own, self._leaves = own.keys(), dict[int, tuple[weakref.ref[Tensor], Tensor | None]]()
            self._trainable = [(parameter, parameter.requires_grad) for parameter in known]
            self.writes = ParameterWrites(known)

    @contextmanager
    def restored(
        self, forget: Callable[[Tensor], None] | None = forget_grad, watch: bool = True
    ) -> Iterator[Snapshot]:
        """Afterwards all is as it was when this was made, which may be done several times.

        ``forget`` is called with each parameter that got its gradient, and drops the gradient at once. Without
        ``forget`` gradients go at the end. ``watch``: other parameters may be written than in earlier runs.
        """
        numpy, self.streams.numpy = self.streams.numpy, True
        handles = []
        with no_torch_function():
            for parameter, _ in self._gradients:
                parameter.grad = None
                if forget is not None and parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(Forget(forget)))
        try:
            with self.writes if watch else nullcontext():
                yield self
        finally:
            for handle in handles:
                handle.remove()
            with torch.no_grad(), no_torch_function():
                self._bring_back()
            torch.clear_autocast_cache()
            self.streams.restore(self._states)
            self.streams.numpy = numpy

    def set_aside(self, node: Any) -> None:
        """Let the leaf of a node of autograd, unless a module has it, get another gradient until all is restored."""
        leaf = leaf_of(node)
        known = self._leaves.get(id(leaf))
        if leaf is not None and id(leaf) not in self._own and (known is None or known[0]() is not leaf):
            self._leaves[id(leaf)] = weakref.ref(leaf), leaf.grad
            leaf.grad = None if leaf.grad is None else leaf.grad.clone()

    def leaves(self) -> list[tuple[Tensor, Tensor | None]]:
        """Those that were set aside and still exist, with the gradients that they had before."""
        found = ((known(), grad) for known, grad in self._leaves.values())
        return [(leaf, grad) for leaf, grad in found if leaf is not None]

    def _bring_back(self) -> None:
        self.writes.undo()
        for parameter, needed in self._trainable:
            parameter.requires_grad_(needed)
        for leaf, grad in (*self._gradients, *self.leaves()):
            leaf.grad = grad
        self._leaves.clear()
        self.kept.bring_back()


class ParameterWrites(TorchFunctionMode):
    """Keeps the values of those ``parameters`` that are written while this is active, and brings them back.

    To copy all parameters would take as much memory again, and hardly any model writes into a parameter. Those that
    are given other memory (``parameter.data = ...``, as weights of bitsandbytes are in evaluation) get their own back.
    """

    _harmless = frozenset(
        {Tensor.grad.__set__, Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined,union-attr]
    )
    """Functions that change a tensor, but not its values."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._own: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.device.type != "meta" and not isinstance(parameter, Placeholder):
                self._own.setdefault(storage_key(parameter), []).append(parameter)
        self._memory = [(each, each.data, storage_key(each)) for some in self._own.values() for each in some]
        self._kept: dict[nn.Parameter, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for target in memory_written(func, args, kwargs or {}) if func not in self._harmless else ():
            for parameter in self._own.get(storage_key(target), ()):
                if parameter not in self._kept:
                    self._kept[parameter] = parameter.detach().clone()
        return func(*args, **(kwargs or {}))

    def written(self) -> set[int]:
        """The storages of the parameters that were ever written."""
        return {storage_key(parameter) for parameter in self._kept}

    def undo(self) -> None:
        """Give the parameters that were ever written what they held before."""
        for parameter, data, memory in self._memory:
            if storage_key(parameter) != memory or parameter.shape != data.shape:
                parameter.data = data
        for parameter, content in self._kept.items():
            parameter.detach().copy_(content)


class Forward:
    """A rehearsal of which only the forward pass matters."""

    going_back = False
    outside_modules = True

    def backward(
        self, tensors: Tensors, grads: Gradients = None, keep: bool = False, scale: float = 1.0
    ) -> None:
        """Nothing: there are no gradients."""

    @contextmanager
    def inside_function(self, name: str, given: Any) -> Iterator[None]:
        """A function of the script's runs."""
        yield


def copy_argument(tensor: Tensor) -> Tensor:
    """A copy of an argument, a leaf if the argument needs a gradient; of a parameter the parameter."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def hand_to_step(tensor: Tensor) -> Tensor:
    """A view of a copied argument, for the step: no leaf, as a slice of a batch is none.

    The view goes when the step ends, and writing into the view gives the copy no graph.
    """
    if isinstance(tensor, nn.Parameter):
        return tensor
    return (tensor if tensor.requires_grad else tensor.data).view_as(tensor)


def on_meta_device(tensor: Tensor) -> Tensor:
    """The tensor without data."""
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
