"""The mode that is on while a microbatch's program runs outside of units.

It sees every torch function. Most concern replicated tensors and go straight through; those with a placed
tensor among their arguments go to the program. Inside a unit the mode is off altogether.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError
from weft.torch.calls.call_signature import after_writes, function_name, meta_like, scan
from weft.torch.execution import gradients
from weft.torch.execution.first_rank_inputs import from_first
from weft.torch.execution.gradients import Gradients, Tensors, refuse_gradient
from weft.torch.execution.program import Program
from weft.torch.execution.value import Value
from weft.torch.pytorch import torch_functions
from weft.torch.pytorch.private import IN_PLACE, READS, any_autocast, count_modes, pop_mode, push_mode, refuse
from weft.torch.session.differing_calls import BACKWARD
from weft.torch.tensors.cut_weights import ask
from weft.torch.tensors.pytree import map_tensors, modules_in

running_here = threading.local()


def running() -> Glue | None:
    """The glue mode of the microbatch that runs on this thread; ``None`` inside units and outside of steps."""
    return getattr(running_here, "glue", None)


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, functions that no mode sees are not intercepted on this thread. Torch functions are not, by then."""
    before, running_here.glue = running(), None
    try:
        yield
    finally:
        running_here.glue = before


@contextmanager
def _operation() -> Iterator[None]:
    """As :func:`_unseen`, for an operation of the program outside of units: it stays there."""
    before, running_here.operates = getattr(running_here, "operates", False), _between_units()
    try:
        with _unseen():
            yield
    finally:
        running_here.operates = before


def _inside_unit() -> bool:
    """True if a unit runs on this thread, in a step."""
    return getattr(running_here, "steps", 0) > 0 and not _between_units()


def _between_units() -> bool:
    """True if a microbatch's program runs on this thread, outside of units."""
    return running() is not None or getattr(running_here, "operates", False)


ask(_inside_unit, _between_units)


class Glue(TorchFunctionMode):
    """The mode of one microbatch; see the module."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        program.tape.unseen = _unseen

    def __enter__(self) -> Glue:
        running_here.glue = self
        running_here.steps = getattr(running_here, "steps", 0) + 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        running_here.glue = None
        running_here.steps -= 1
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def lifted(self) -> Lifted:
        """No interception inside: for units. Modes that the user has put on top stay."""
        return Lifted(self)

    def aside(self) -> Aside:
        """As :meth:`lifted`, also where PyTorch has taken this mode off already, because the mode answers a call."""
        return Aside(self)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call that no torch-function mode sees, as if this mode had seen it."""
        with self.lifted():
            placed: list[tuple[Tensor, Value]] = []
            self._find((*args, *kwargs.values()), placed)
            if placed:
                result = self._call(
                    func, args, kwargs, placed, None, home_of(func, modules_in((args, kwargs)))
                )
                return map_tensors(result, self._as_result)
        return func(*args, **kwargs)

    def backward(
        self, tensors: Tensors, grads: Gradients = None, keep: bool = False, scale: float = 1.0
    ) -> None:
        """A backward pass of the microbatch; see ``thread_settings.BackwardTaker``."""
        self.program.scale = scale
        self.program.log.append(BACKWARD)
        proof = self.program.pipeline.proof
        with self.aside():
            if proof is None:
                gradients.run_backward(self.program, tensors, grads, keep)
                return
            proof.begins_at(self.program, tensors)
            with proof.going_back(self.program):
                gradients.run_backward(self.program, tensors, grads, keep)

    def from_first(self, inputs: Any) -> Any:
        """The model's arguments, as values of the pipeline's first rank."""
        with self.lifted():
            return from_first(self.program, inputs)

    def _as_result(self, tensor: Tensor) -> Tensor:
        """``tensor``; a placeholder gets a ``grad_fn`` first, which the result of an autograd function has."""
        if tensor.device.type != "meta" or not tensor.requires_grad:
            return tensor
        result = tensor.clone()
        result._weft_value = tensor._weft_value  # type: ignore[attr-defined]
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = getattr(func, torch_functions.STANDS_FOR, func)
        if func in torch_functions.METADATA or (
            func is torch_functions.TYPE_NAME and len(args) == 1 and not kwargs
        ):
            return self._metadata(func, args, kwargs)
        placed: list[tuple[Tensor, Value]] = []
        self._find(args, placed)
        if kwargs:
            self._find(tuple(kwargs.values()), placed)
        if not placed:
            return func(*args, **kwargs)
        return self._operate(func, args, kwargs, placed)

    def _find(self, items: Any, placed: list[tuple[Tensor, Value]]) -> None:
        """Placed tensors among ``items`` (and lists, tuples, dicts and slices in them), in order."""
        for item in items:
            if isinstance(item, Tensor):
                value = self.program.value_of(item)
                if value is not None:
                    placed.append((item, value))
                elif item.device.type == "meta":
                    self.refuse_meta(item)
            elif isinstance(item, (list, tuple)):
                self._find(item, placed)
            elif isinstance(item, dict):
                self._find(item.values(), placed)
            elif isinstance(item, slice):
                self._find((item.start, item.stop, item.step), placed)

    def refuse_meta(self, tensor: Tensor) -> None:
        """Refuse a placeholder of which nobody knows who has its data."""
        if tensor._weft_value is None:  # type: ignore[attr-defined]
            raise UsageError(
                "a tensor without data came out of a function that weft cannot follow between modules (functorch, a "
                "custom C++ operator?); keep the module that calls it in one piece: weft.set_partition(module, index)"
            )

    def _metadata(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, Tensor):
            value = tensor._weft_value  # type: ignore[attr-defined]
            if value is not None:
                if value.owner != self.program.rank:
                    answer = torch_functions.PLACE_GETTERS.get(func)
                    if answer is not None:
                        return answer(self.program.pipeline.device)
                    if func is torch_functions.TYPE_NAME:
                        return torch.empty(0, dtype=tensor.dtype, device=self.program.pipeline.device).type()
                if value.actual is not None:
                    return func(value.actual, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _operate(self, func: Any, args: Any, kwargs: Any, placed: list[tuple[Tensor, Value]]) -> Any:
        program = self.program
        if func in torch_functions.READS:
            refuse(READS)
            return program.read(
                placed[0][0],
                placed[0][1],
                lambda local: func(local, *args[1:], **kwargs),
                function_name(func),
            )
        if func in torch_functions.LIKE:
            return self._like(func, args, kwargs)
        if torch_functions.is_for_each(func) and len(args[0]) > 1:
            return self._for_each(func, args, kwargs)
        if func in torch_functions.AUTOGRAD:
            return self._autograd(func, args, kwargs, placed)
        if func in torch_functions.RESHAPED:
            return self._reshaped(func, args, kwargs, placed)
        if func in torch_functions.REPLACED and (
            func != torch_functions.DATA_SETTER or after_writes(args[0]).shape != after_writes(args[1]).shape
        ):
            raise UsageError(
                f"{function_name(func)} gives a tensor that goes from module to module other memory, which the other "
                "ranks do not see: make a new tensor instead"
            )
        if func is Tensor.__iter__:
            return iter(self._operate(Tensor.unbind, args, {}, placed))
        target = next(iter(torch_functions.targets(func, args, kwargs)), None)
        return self._call(func, args, kwargs, placed, target)

    def _for_each(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation on lists, whose tensors may lie on several ranks: one after the other."""
        each = torch_functions.one_by_one(args, kwargs, [[number] for number in range(len(args[0]))])
        results = [self.__torch_function__(func, (), *inputs) for inputs in each]
        return None if torch_functions.targets(func, args, kwargs) else [one for (one,) in results]

    def _call(
        self, func: Any, args: Any, kwargs: Any, placed: list[tuple[Tensor, Value]], target: Tensor | None,
        home: int | None = None,
    ) -> Any:  # fmt: skip
        program = self.program
        if target is not None:
            refuse(IN_PLACE)
        target_value = None if target is None else program.value_of(target)
        if target is not None and is_buffer(target) and any(tensor is not target for tensor, _ in placed):
            raise UsageError(
                "the model's own forward writes its activations into one of its buffers while other microbatches read "
                "it: move the buffer and what writes it into a submodule"
            )
        owner = program.placed.newest_owner(placed) if target_value is None else target_value.owner
        owner = owner if home is None else home
        parts: list[Any] = [func, *settings()]
        tensors: list[Tensor] = []
        scan((args, kwargs), parts, tensors, func not in torch_functions.VALUE_FREE)
        if len(tensors) != len(placed):
            program.share(tensors, owner)
        if func in torch_functions.SHAPED_BY_FLOATS:
            parts += [
                str(item) for item in (*args, *kwargs.values()) if isinstance(item, (float, list, tuple))
            ]
        key = tuple(parts)
        name = function_name(func)
        call = program.next_call(key)
        alias = None
        if func in torch_functions.VIEWS and target is None:
            alias = placed[0][1].alias
            if not alias.views:
                alias.views.append(weakref.ref(placed[0][0]))
        if owner != program.rank:
            program.send_all(placed, owner)
            spec = program.spec_for(key, name, owner, call)
            result = program.placeholders_for(spec, owner, tensors, (args, kwargs), alias)
            return result if target is None else target

        def run(local: Any) -> Any:
            with _operation():  # rules of sharded tensors use autograd functions
                result = func(*local[0], **local[1])
            return result if target is None else None

        result = program.run_here(key, name, call, run, tensors, (args, kwargs), localise_arguments, alias)
        return result if target is None else target

    def _reshaped(self, func: Any, args: Any, kwargs: Any, placed: list[tuple[Tensor, Value]]) -> Tensor:
        """A tensor gets another shape in place: its owner does it, the others work out what comes of it."""
        tensor = placed[0][0]
        if tensor._weft_owner is not None:  # type: ignore[attr-defined]
            raise UsageError(
                "the model's own forward changes the shape of a parameter or buffer in place, which the other ranks do "
                "not see: use a view of it instead"
            )
        new = meta_like(after_writes(tensor))
        self._call(func, args, kwargs, placed, tensor)
        value = self.program.value_of(tensor)
        assert value is not None
        if value.owner != self.program.rank:
            with torch.no_grad():
                value.actual = func(new, *args[1:], **kwargs)
        return tensor

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function that needs only its tensor's shape, dtype and device: every rank runs it on an empty one."""
        device = self.program.pipeline.device

        def empty(tensor: Tensor) -> Tensor:
            if self.program.value_of(tensor) is None:
                return tensor
            return torch.empty((), dtype=tensor.dtype, device=device).expand(after_writes(tensor).shape)

        first = empty(args[0]) if args else empty(kwargs.pop("input"))
        return func(first, *args[1:], **kwargs)

    def _autograd(self, func: Any, args: Any, kwargs: Any, placed: list[tuple[Tensor, Value]]) -> Any:
        """Autograd's own functions, on placed tensors."""
        if func in torch_functions.GRADIENTS and args[0]._weft_owner is not None:
            if not is_buffer(args[0]):
                refuse_gradient(args[0], "reads")
            return func(*args, **kwargs)
        if func == torch_functions.GRADIENT_SETTER:
            if args[0]._weft_owner is not None:
                refuse_gradient(args[0], "sets")
            return self._call(func, args, kwargs, placed, args[0])
        if func in torch_functions.BACKWARD:  # it goes on to the model's, see ``entry_points``
            if "gradient" in kwargs:
                kwargs["grad_tensors"] = kwargs.pop("gradient")
            return torch.autograd.backward(*args, **kwargs)
        proof = self.program.pipeline.proof
        with self.aside(), nullcontext() if proof is None else proof.going_back(self.program):
            if func in torch_functions.GRADIENTS:
                return gradients.read_grad(self.program, *placed[0])
            return gradients.grad(self.program, *args, **kwargs)


class Lifted:
    """See :meth:`Glue.lifted`."""

    __slots__ = ("above", "glue")

    def __init__(self, glue: Glue) -> None:
        self.glue = glue
        self.above: list[Any] = []

    def __enter__(self) -> None:
        while (mode := pop_mode()) is not self.glue:
            self.above.append(mode)
        self._put_back()
        running_here.glue = None

    def __exit__(self, *details: Any) -> None:
        for _ in self.above:
            pop_mode()
        push_mode(self.glue)
        self._put_back()
        running_here.glue = self.glue

    def _put_back(self) -> None:
        for mode in reversed(self.above):
            push_mode(mode)


class Aside(Lifted):
    """See :meth:`Glue.aside`."""

    __slots__ = ("found",)

    def __enter__(self) -> None:
        self.found = False
        while count_modes() and not self.found:
            mode = pop_mode()
            self.found = mode is self.glue
            if not self.found:
                self.above.append(mode)
        self._put_back()
        running_here.glue = None

    def __exit__(self, *details: Any) -> None:
        if self.found:
            super().__exit__(*details)
        else:
            running_here.glue = self.glue


def home_of(func: Any, modules: list[nn.Module]) -> int | None:
    """The partition of the modules that an autograd function gets, where it has to run."""
    owners = {parameter._weft_owner for module in modules for parameter in module.parameters()} - {None}  # type: ignore[attr-defined]
    if len(owners) > 1:
        raise UsageError(
            f"{function_name(func)} gets modules of the partitions {', '.join(map(str, sorted(owners)))}, and no rank "
            "can run it with all of them: put them on the same one with weft.set_partition"
        )
    return next(iter(owners), None)


def is_buffer(tensor: Tensor) -> bool:
    """True if the tensor is a buffer of a model that is split."""
    found: bool = tensor._weft_buffer  # type: ignore[attr-defined]
    return found


def settings() -> tuple[Any, ...]:
    """The settings that besides its arguments decide the shapes and dtypes that a call returns."""
    if not any_autocast():
        return (torch.is_grad_enabled(),)
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def localise_arguments(inputs: Any, transform: Callable[[Tensor], Tensor]) -> Any:
    """The arguments (args, kwargs) of a torch function with their tensors replaced."""
    args, kwargs = map_tensors(inputs, transform)
    return localise_slices(args, transform), kwargs


def localise_slices(args: Any, transform: Callable[[Tensor], Tensor]) -> Any:
    """Tensors inside of slices (``x[:n]``) are arguments too."""
    if not any(
        isinstance(item, slice) for arg in args if isinstance(arg, tuple) for item in (*arg, arg)
    ) and not any(isinstance(arg, slice) for arg in args):
        return args

    def one(item: Any) -> Any:
        if isinstance(item, slice):
            ends = (item.start, item.stop, item.step)
            return slice(*(transform(end) if isinstance(end, Tensor) else end for end in ends))
        return tuple(one(part) for part in item) if type(item) is tuple else item

    return tuple(one(arg) for arg in args)
