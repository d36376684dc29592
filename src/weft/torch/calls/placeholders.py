"""Placeholders: what a rank has in place of the parameters and buffers of other ranks.

A placeholder has the shape, dtype and device of what it stands for, and no values. Between steps it behaves as if every
line of the script ran on the rank that has the values: what is computed from it is a placeholder too, what is written
into it is left to its owner, and its values cannot be read here. To combine it with what lives on another rank is
refused, because no rank has both. So a script's own arithmetic with weights gives one process's numbers, or an error.

What calls on other partitions have put into containers has placeholders too; see `weft.torch.calls.container_writes`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.pytorch import torch_functions
from weft.torch.pytorch.private import no_torch_function
from weft.torch.tensors.pytree import is_wrapped, map_tensors, plain_tensors_of, replace_inside, tensors_in

_SAME = torch_functions.METADATA | torch_functions.GRADIENTS | torch_functions.named(
    (Tensor,), ("data_ptr", "untyped_storage", "storage_type", "share_memory_", "pin_memory", "is_set_to")
) | {getattr(Tensor.grad, how) for how in ("__set__", "__delete__")} | {Tensor.requires_grad.__set__}  # type: ignore[attr-defined]  # fmt: skip
"""What needs no values: PyTorch's own answer is the right one."""
_CASTS = torch_functions.named(
    (Tensor,), ("to", "cpu", "cuda", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int", "bool")
)  # fmt: skip
_DETACH = torch_functions.named((Tensor, torch), ("detach",))
_FITS = "_has_compatible_shallow_copy_type"
"""``module.to`` asks this before it sets ``data``, which suits every placeholder."""
_COMPUTED, _GRADIENT_OF = "what was computed from ", "the gradient of "
_KEEP_NAME = torch_functions.VIEWS | _CASTS | torch_functions.named((Tensor, torch), ("clone", "detach"))


class _Owner:
    """``_weft_owner`` of what was computed from a placeholder: a step cannot use it."""

    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        if tensor is not None:
            _refuse(tensor)
        return None


class Gradients:
    """Says whether a script that reads ``.grad`` of a placeholder gets a placeholder, as its owner has a gradient.

    Optimizers, schedulers, PyTorch and weft get None: they leave out what is not here. A script's own sum over
    gradients would be that of this rank's alone.
    """

    passes = 0
    """So many steps had a backward pass."""


class Placeholder(Tensor):
    """See the module. ``_weft_of``: the partition that has the values, and the name of the parameter or buffer."""

    _weft_of: tuple[int, str]
    _weft_device: torch.device
    _weft_forgotten = 0
    """So many steps had had a backward pass when its gradient was last set to None."""
    _weft_owner = _Owner()

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = getattr(func, torch_functions.STANDS_FOR, func)
        with no_torch_function():
            if func in torch_functions.PLACE_GETTERS:
                return torch_functions.PLACE_GETTERS[func](args[0]._weft_device)
            if func.__name__ == _FITS:
                return True
            if func == torch_functions.GRADIENT_GETTER and _asked_by_script(sys._getframe(1)):
                return _gradient(args[0])
            if func == torch_functions.GRADIENT_SETTER and (
                args[1] is None or isinstance(args[1], Placeholder)
            ):
                return _set_gradient(*args)
            if func in _SAME:
                return func(*args, **(kwargs or {}))
            return _on_owner(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        owner, name = self._weft_of
        return f"<{name}, on partition {owner}: {list(self.shape)}, {self.dtype}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _marked(_hollow(self), type(self), *self._weft_of, self._weft_device)
            memo[id(self)].requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self)


def placeholder(tensor: Tensor, owner: int, name: str) -> None:
    """Let a tensor of this rank be a placeholder from now on, and free its values."""
    if not isinstance(tensor, Placeholder):  # a copy of one is
        tensor.grad = None
        if is_wrapped(tensor):
            replace_inside(tensor, _hollow)
        else:
            tensor.data = _hollow(tensor)
    _marked(tensor, _kind(type(tensor)), owner, name, tensor.device)
    tensor._weft_forgotten = Gradients.passes  # type: ignore[attr-defined]


@contextmanager
def filled(tensor: Tensor, values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, a placeholder is no placeholder: it holds these values, the tensors that it is made of."""
    kind = type(tensor)
    assert issubclass(kind, Placeholder)
    tensor.__class__ = kind_of(tensor)
    hollow = _put(tensor, values)
    try:
        yield
    finally:
        tensor.grad = None
        _put(tensor, hollow)
        tensor.__class__ = kind


def put_values(tensor: Tensor, values: Sequence[Tensor]) -> None:
    """Let a tensor hold these values from now on, those that it is made of; a placeholder is none any more."""
    tensor.__class__ = kind_of(tensor)
    _put(tensor, values)


def _put(tensor: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Let a tensor hold these values, one of each that it is made of; those that it held."""
    if not is_wrapped(tensor):
        before, tensor.data = tensor.data, values[0]
        return [before]
    held = [*plain_tensors_of(tensor)]
    given = iter(values)
    replace_inside(tensor, lambda _: next(given))
    return held


def kind_of(tensor: Tensor) -> Any:
    """The class of a tensor; of a placeholder that of what it stands for."""
    return next(each for each in type(tensor).__mro__ if not issubclass(each, Placeholder))


@functools.cache
def _kind(kind: type[Tensor]) -> type[Tensor]:
    """Placeholders of a class of tensors are of that class, too."""
    if issubclass(kind, Placeholder):
        return kind
    if kind is Tensor:
        return Placeholder
    return types.new_class(f"Placeholder{kind.__name__}", (Placeholder, kind))


def _marked(tensor: Tensor, kind: type[Tensor], owner: int, name: str, device: torch.device) -> Any:
    tensor.__class__ = kind
    tensor._weft_of, tensor._weft_device = (owner, name), device  # type: ignore[attr-defined]
    return tensor


def _hollow(tensor: Tensor) -> Tensor:
    """Of the same shape, dtype and device, without memory of its own."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _like(tensor: Tensor, first: Placeholder, name: str, device: torch.device) -> Any:
    """For a result that only the owner of ``first`` has; on the meta device, where PyTorch itself reads nothing."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _marked(made, Placeholder, first._weft_of[0], name, device)


def is_gradient(tensor: Tensor) -> bool:
    """True if it stands for the gradient of another rank's parameter."""
    return isinstance(tensor, Placeholder) and tensor._weft_of[1].startswith(_GRADIENT_OF)


def _asked_by_script(frame: types.FrameType) -> bool:
    """True if a script or another library asks, and not PyTorch, weft or the step of an optimizer or a scheduler.

    Such a step reads its state of a parameter with a gradient, which the owner has.
    """
    if _module(frame).startswith(("torch.", "weft.")):
        return frame.f_code.co_name == "zero_grad"
    caller: types.FrameType | None = frame
    while caller is not None and not _module(caller).startswith("torch.optim."):
        caller = caller.f_back
    return caller is None


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _gradient(tensor: Placeholder) -> Tensor | None:
    """Stands for the gradient that the owner has."""
    if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
        return None
    if tensor._weft_forgotten >= Gradients.passes:
        return None
    return elsewhere(tensor, tensor, _GRADIENT_OF.strip())


def _set_gradient(tensor: Placeholder, gradient: Placeholder | None) -> None:
    """Set or forget the gradient, which the owner does with its own; nothing is here."""
    if gradient is not None:
        _check([tensor, gradient])
    tensor._weft_forgotten = Gradients.passes if gradient is None else -1


def _refuse(tensor: Placeholder) -> NoReturn:
    owner, name = tensor._weft_of
    if _GRADIENT_OF in name:
        raise UsageError(f"{name} lives on partition {owner}, so its values are not here: {_OF_GRADIENTS}")
    raise UsageError(
        f"{name} lives on partition {owner}, so its values are not here: model.state_dict() gives those of the whole "
        "model on every rank (call it on all), model.local_parameters() and model.local_buffers() give this rank's"
    )


def _computed(first: Placeholder) -> str:
    return f"{_COMPUTED}{first._weft_of[1].removeprefix(_COMPUTED)}"


_OF_GRADIENTS = (
    "torch.nn.utils.get_total_norm and clip_grad_norm_ give the norm of all ranks' gradients (call them on all), "
    "model.local_parameters() gives this rank's parameters"
)


def _refuse_both(first: Placeholder, other: str) -> NoReturn:
    owner, name = first._weft_of
    if _GRADIENT_OF in name:
        raise UsageError(
            f"{name} lives on partition {owner} and {other}, so no rank can compute with both: {_OF_GRADIENTS}"
        )
    raise UsageError(
        f"{name} lives on partition {owner} and {other}, so no rank can compute with both: put their modules on the "
        "same partition with weft.set_partition, do it inside of the step, or use model.state_dict(), which gives each "
        "rank the values of the whole model (call it on all)"
    )


def _place(tensor: Tensor) -> int | None:
    """The partition that alone has a tensor's values; ``None`` for one that every rank has."""
    return tensor._weft_of[0] if isinstance(tensor, Placeholder) else tensor._weft_owner  # type: ignore[attr-defined]


def _check(tensors: list[Tensor]) -> Placeholder:
    """The first placeholder among tensors that one operation uses; refused if no rank has them all."""
    first = next(tensor for tensor in tensors if isinstance(tensor, Placeholder))
    owner = first._weft_of[0]
    for tensor in tensors:
        at = _place(tensor)
        if at is not None and at != owner:
            what = (
                tensor._weft_of[1]
                if isinstance(tensor, Placeholder)
                else f"a tensor of shape {list(tensor.shape)}"
            )
            _refuse_both(first, f"{what} on partition {at}")
    return first


def _on_owner(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The placeholder for the result of an operation that the rank of its placeholders does with their values."""
    if torch_functions.is_for_each(func):
        return _for_each(func, args, kwargs)
    tensors = tensors_in((args, kwargs))
    first = _check(tensors)
    if func in torch_functions.READS or func in torch_functions.AUTOGRAD:
        _refuse(first)
    target = torch_functions.written(func, args, kwargs)
    if target is not None:
        if not isinstance(target, Placeholder):
            _refuse(first)
        if func == torch_functions.DATA_SETTER:
            new = args[1]
            device = new._weft_device if isinstance(new, Placeholder) else new.device
            held = torch.device("meta") if target.is_meta else device
            func(target, torch.zeros((), dtype=new.dtype, device=held).expand(new.shape))
            target._weft_device = device
        return target
    local = next((tensor for tensor in tensors if not isinstance(tensor, Placeholder) and tensor.dim()), None)
    if local is not None:
        _refuse_both(first, f"a tensor of shape {list(local.shape)} is this rank's own")
    name = first._weft_of[1] if func in _KEEP_NAME else _computed(first)
    if func in _CASTS:
        one = func(torch.zeros((), dtype=first.dtype, device=first._weft_device), *args[1:], **kwargs)
        if not isinstance(one, Tensor):
            _refuse(first)
        return _like(one.expand(first.shape), first, name, one.device)
    result = _on_meta(func, args, kwargs, first)
    if func in _DETACH:  # as nn.Parameter(parameter) wants it
        return _marked(result, type(first), first._weft_of[0], name, first._weft_device)
    return map_tensors(result, lambda tensor: _like(tensor, first, name, first._weft_device))


def _on_meta(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], first: Placeholder) -> Any:
    """Shapes and dtypes of the results, as tensors without memory."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    try:
        with torch.no_grad():
            result = func(*map_tensors(args, empty), **map_tensors(kwargs, empty))
    except NotImplementedError:
        _refuse(first)
    if not tensors_in(result):
        _refuse(first)
    return result


def _for_each(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on lists: here for what is here, and left to the owners elsewhere."""
    count = len(args[0])
    writes = func.__name__.endswith("_")
    here: list[int] = []
    results: list[Any] = [None] * count
    for number, inputs in enumerate(
        torch_functions.one_by_one(args, kwargs, [[number] for number in range(count)])
    ):
        if not any(isinstance(tensor, Placeholder) for tensor in tensors_in(inputs)):
            here.append(number)
            continue
        first = _check(tensors_in(inputs))
        if not writes:
            made = _on_meta(func, *inputs, first)[0]
            results[number] = _like(made, first, _computed(first), first._weft_device)
        elif not isinstance(args[0][number], Placeholder):
            _refuse(first)
    if here:
        ((positional, others),) = torch_functions.one_by_one(args, kwargs, [here])
        for number, made in zip(here, func(*positional, **others) or [None] * len(here), strict=True):
            results[number] = made
    return None if writes else results


def elsewhere(like: Tensor, first: Placeholder, what: str) -> Tensor:
    """Stands for a result that only the owner of ``first`` has; ``what`` it is of ``first``, for messages."""
    made: Tensor = _like(like, first, f"{what} {first._weft_of[1]}", first._weft_device)
    return made


class Left(Tensor):
    """A remote entry: what a call on another partition has put into a container, seen by modules that it is not sent
    to.

    ``_weft_of``: its partition, and the module that has left it.
    """

    _weft_of: tuple[int, str]
    _weft_device: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = getattr(func, torch_functions.STANDS_FOR, func)
        with no_torch_function():
            found = next(each for each in tensors_in((args, kwargs)) if isinstance(each, Left))
            if func in torch_functions.PLACE_GETTERS:
                return torch_functions.PLACE_GETTERS[func](found._weft_device)
            if func in torch_functions.METADATA:
                return func(*args, **(kwargs or {}))
            shape = list(found.shape)
        owner, module = found._weft_of
        raise UsageError(
            f"a tensor of shape {shape} that {module} has put into a list, dict or object (a cache of keys "
            f"and values, say) lies on partition {owner}, and a module on another partition uses it that did not do "
            "so in the first microbatch of the first step, so that it was not sent: let that microbatch use it, too, "
            "or keep both modules on one partition with weft.set_partition(module, index). The function that "
            "@weft.step decorates may use it at any time, as may the code between modules"
        )


def mark_left(tensor: Tensor, module: str, owner: int, device: torch.device) -> None:
    """Let a placeholder on this rank be a `Left`."""
    marked: Any = tensor
    if type(tensor) is Tensor:
        marked.__class__ = Left
        marked._weft_of, marked._weft_device = (owner, module), device
