"""Entry points of PyTorch that no torch-function mode sees: activation checkpoints, custom autograd functions and
functions of ``torch.jit.script``.

In glue, a checkpoint cannot run its function again later, because what it calls may live on other ranks. So inside a
checkpoint glue runs as usual, and every *unit* called in it is checkpointed by the rank that runs it.
``torch.autograd.Function`` or a scripted function in glue is an operation like any other: it runs where its newest
argument is.

Outside of glue they are what they were. See ``docs/design/execution.md``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints

from weft.errors import UsageError
from weft.torch.execution.glue import running
from weft.torch.execution.gradients import root_gradients
from weft.torch.execution.program import Program
from weft.torch.execution.thread_settings import AUTOGRAD, backward_taker, going_back, in_step_code, rehearsal
from weft.torch.pytorch.private import CHECKPOINT, CHECKPOINT_GENERATOR, FUNCTION, REENTRANT, SCRIPTED, refuse
from weft.torch.session import current

_installed = False
_second_run: Callable[[], AbstractContextManager[None]] = nullcontext
_seen = {"checkpoints": 0}


def install(
    replaced: Iterable[tuple[Any, Any]], second_run: Callable[[], AbstractContextManager[None]]
) -> bool:
    """True if this call has put the interceptions in place; that happens once for the process.

    ``replaced``: functions of PyTorch, and what stands for them. ``second_run``: around a checkpointed function that
    runs again.
    """
    global _installed, _second_run
    if _installed:
        return False
    _installed, _second_run = True, second_run
    _intercept_checkpoints()
    _intercept_functions()
    _intercept_scripted()
    _intercept_backward()
    for old, new in replaced:
        _replace_everywhere(old, new)
    return True


def checkpoints_seen() -> int:
    """The number of activation checkpoints that have run outside of glue: their functions may run again."""
    return _seen["checkpoints"]


@contextmanager
def checkpointing(program: Program) -> Iterator[None]:
    """Units that are called inside are checkpointed."""
    before, program.checkpointing = program.checkpointing, True
    try:
        yield
    finally:
        program.checkpointing = before


def run_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, for an activation checkpoint that runs it a second time; see :func:`install`."""

    @functools.wraps(function)
    def again(*args: Any, **kwargs: Any) -> Any:
        with _second_run():
            return function(*args, **kwargs)

    return again


class Again:
    """Calls a function: the first time as it is, later by :func:`run_again`, on the containers of then."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._then: tuple[dict[int, Any], dict[str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._then is None:
            self._then = _containers(enumerate(args)), _containers(kwargs.items())
            return self._function(*args, **kwargs)
        then, named = self._then  # not the tensors: PyTorch may have detached them
        args = tuple(then.get(at, each) for at, each in enumerate(args))
        return run_again(self._function)(*args, **{**kwargs, **named})


def _containers(given: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    return {key: as_now(each) for key, each in given if type(each) in (list, tuple, dict)}


def as_now(given: Any) -> Any:
    """``given`` with lists, tuples and dicts of its own: a checkpoint's second run must not see what is put into them
    later. A unit's lists hold what this rank has only while it runs. Those of classes of their own stay the same."""
    if type(given) in (list, tuple):
        return type(given)(map(as_now, given))
    if type(given) is dict:
        return {key: as_now(item) for key, item in given.items()}
    return given


def _generator(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Stands for ``original``, inside of which PyTorch runs a checkpointed function; in glue units are checkpointed."""

    @functools.wraps(original)
    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        glue = running()
        if glue is None:
            _seen["checkpoints"] += 1
            if args:
                args = (run_again(args[0]), *as_now(args[1:]))
            yield from original(*args, **as_now(kwargs))
            return
        refuse(CHECKPOINT)
        with checkpointing(glue.program):
            yield

    return generator


def _intercept_checkpoints() -> None:
    if CHECKPOINT_GENERATOR is not None:
        name = CHECKPOINT_GENERATOR.rpartition(".")[2]
        setattr(checkpoints, name, _generator(getattr(checkpoints, name)))
    else:
        replace_checkpoint()

    class Reentrant(checkpoints.CheckpointFunction):
        """``CheckpointFunction``, except in glue. Results need a gradient only if an argument does, in both."""

        @classmethod
        def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            glue = running()
            if glue is None:
                _seen["checkpoints"] += 1
                return checkpoints_function.apply(Again(function), preserve_rng_state, *args)  # type: ignore[no-untyped-call]
            refuse(REENTRANT)
            needed = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            with checkpointing(glue.program), nullcontext() if needed else torch.no_grad():
                return function(*args)

    checkpoints_function = checkpoints.CheckpointFunction
    checkpoints.CheckpointFunction = Reentrant  # type: ignore[misc]


def replace_checkpoint() -> None:
    """Intercept the public function, where its parts cannot be: all modules that hold it by a name get another one."""
    _replace_everywhere(checkpoints.checkpoint, _checkpoint(checkpoints.checkpoint))


def _checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's ``checkpoint``, except in glue."""
    own = set(inspect.signature(original).parameters) - {"function", "args", "kwargs"}

    @functools.wraps(original)
    def checkpoint(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        glue = running()
        if glue is None or function is None:
            _seen["checkpoints"] += 1
            return original(function and Again(function), *args, **kwargs)
        refuse(CHECKPOINT)
        with checkpointing(glue.program):
            return function(*args, **{name: value for name, value in kwargs.items() if name not in own})

    checkpoint.__module__ = __name__
    return checkpoint


def _replace_everywhere(old: Any, new: Any) -> None:
    """Let every module of the process that has ``old`` under some name have ``new``."""
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        for name in [name for name, value in list(names.items()) if value is old]:
            setattr(module, name, new)


class Bound:
    """A method with its object, which glue can treat as a function: hashable, with a name."""

    def __init__(self, method: Callable[..., Any], module: str, name: str) -> None:
        self._method = method
        self.__name__ = method.__name__
        self.__module__ = module
        self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


def _intercept_functions() -> None:
    kind = torch.autograd.Function
    of = inspect.getattr_static(kind, "apply").__get__  # a classmethod, in Python or (since 2.14) in C

    @functools.cache
    def bound(cls: type) -> Bound:
        return Bound(of(None, cls), cls.__module__, f"{cls.__qualname__}.apply")

    @functools.wraps(of(None, kind))
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        glue = running()
        if glue is None:
            # PyTorch's own functions call what they are given as it comes, an activation checkpoint above all
            tracer = None if cls.__module__.startswith("torch.") else rehearsal()
            with (
                nullcontext() if tracer is None else tracer.inside_function(cls.__qualname__, (args, kwargs))
            ):
                return of(None, cls)(*args, **kwargs)
        refuse(FUNCTION)
        return glue.call(bound(cls), args, kwargs)

    kind.apply = classmethod(apply)  # type: ignore[method-assign,assignment]


def _intercept_scripted() -> None:
    kind = torch.jit.ScriptFunction
    original = kind.__call__

    @functools.cache
    def bound(function: Any) -> Bound:
        return Bound(MethodType(original, function), "torch.jit", function.qualified_name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        glue = running()
        if glue is None:
            return original(self, *args, **kwargs)
        refuse(SCRIPTED)
        return glue.call(bound(self), args, kwargs)

    kind.__call__ = call  # type: ignore[method-assign]


OUTSIDE = (
    "the loss has no graph, as what a step returns has none: the backward pass belongs into the function that "
    "@weft.step decorates: model.backward(loss)"
)


class NoGraphError(UsageError, RuntimeError):
    """A backward pass begins where there is no graph; PyTorch's own error is a RuntimeError."""


def _intercept_backward() -> None:
    """``torch.autograd.backward(losses)``, and ``loss.backward()``, which ends there, are the model's ``backward``."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(
        tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> None:  # fmt: skip
        models = current.session().models if in_step_code() else []
        if not models:
            try:
                original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            except RuntimeError as error:
                if (
                    "does not require grad" in str(error)
                    and current.is_initialized()
                    and current.session().steps
                ):
                    raise NoGraphError(f"{OUTSIDE} (PyTorch: {error})") from None
                raise
            return
        scales = {model.loss_scale() for model in models}
        if len(scales) > 1:
            raise UsageError(
                "loss.backward() in a step: the models weigh losses differently, so call backward of the one that "
                "computed it: model.backward(loss)"
            )
        given = grad_tensors if grad_variables is None else grad_variables
        if backward_taker() is not AUTOGRAD:
            if create_graph or inputs is not None:
                raise UsageError(
                    "inside a step that is split, backward() takes no create_graph and no inputs: "
                    "torch.autograd.grad gives the gradients of chosen tensors"
                )
            models[0].backward(tensors, given, bool(retain_graph))
            return
        roots, grads = root_gradients(tensors, given, *scales)  # one partition: all that autograd can
        with going_back():
            original(roots, grads, retain_graph, create_graph, inputs=inputs)

    torch.autograd.backward = backward
