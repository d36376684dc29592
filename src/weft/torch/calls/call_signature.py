"""Signatures of calls, and descriptions of their results.

A rank that does not run a call must still know the shapes it returns. It never infers them: the rank
that runs the call sends them to the others, once for each *signature* (what is called, with which shapes, dtypes
and settings), and everyone remembers. Calls whose result depends on more than that, on data or on
Python's random numbers, are sent each time: *dynamic*.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from weft.errors import UsageError
from weft.torch.pytorch.private import TorchDispatchMode
from weft.torch.pytorch.torch_functions import READS, SHAPED_BY_TENSORS
from weft.torch.tensors.description import Describer
from weft.torch.tensors.pytree import (
    Data,
    attributes_of,
    opaque_objects,
    tensors_in,
)


class Spec(NamedTuple):
    """The result of a call, seen from outside: a ``description`` (see ``tensors.description``), and what all ranks must
    know of the call.

    ``dynamic``: the owner sends the description at each call. ``random``: the streams that the call draws from.
    ``mutated``: the numbers of the argument tensors that the call writes into. ``passed``: for each tensor of the
    result -1 if the tensor is new, else the number of the argument tensor that is returned; empty if all are new.
    """

    description: list[Any]
    dynamic: bool
    random: int
    mutated: tuple[int, ...]
    passed: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """True if the call returns one new tensor and does nothing else."""
        more = self.dynamic or self.random or self.mutated or self.passed
        form: str = self.description[0]
        return not more and form == "tensor"

    def returns(self, shape: torch.Size) -> bool:
        """True if the call returns one tensor, of this shape."""
        return bool(self.description[0] == "tensor" and self.description[1][1] == [*shape])

    def to_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Spec:
        description, dynamic, random, mutated, passed = json.loads(text)
        return cls(description, dynamic, random, tuple(mutated), tuple(passed))


def describe_result(
    result: Any, name: str, inputs: Any, tensors: Sequence[Tensor], shared: bool = True
) -> tuple[list[Any], tuple[int, ...]]:
    """The ``description`` and ``passed`` of a ``Spec``, for the result of the call of ``name``.

    ``tensors``: the tensors among the call's ``inputs``, as the call got them. ``shared``: other ranks will build it.
    """
    describer = Describer(inputs, shared)
    try:
        description = describer.describe(result)
    except UsageError as error:
        raise UsageError(f"{name} {error}") from None
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    passed = tuple(numbers.get(id(tensor), -1) for tensor in describer.tensors)
    return description, passed if any(number >= 0 for number in passed) else ()


ONE = (tuple, 1)
"""What :func:`scan` finds in the arguments ``(tensor,)``, before the tensor's shape and dtype."""


def scan(tree: Any, parts: list[Any], tensors: list[Tensor], values: bool = True) -> None:
    """Append to ``parts`` what a signature holds of ``tree``, to ``tensors`` its tensors in order.

    Tensors in attributes of opaque objects are left out. ``values=False`` leaves out numbers. Torch functions must not
    be intercepted while this runs.
    """
    if isinstance(tree, Tensor):
        tensors.append(tree)
        tree = after_writes(tree)
        parts.append(tree.shape)
        parts.append(tree.dtype)
    elif tree is None or tree is True or tree is False or isinstance(tree, (str, enum.Enum)):
        parts.append(tree)
    elif isinstance(tree, int):
        parts.append(tree if values else int)
    elif isinstance(tree, (float, complex)):
        parts.append(type(tree))
    elif isinstance(tree, (list, tuple)):
        parts.append((list if isinstance(tree, list) else tuple, len(tree)))
        for item in tree:
            scan(item, parts, tensors, values)
    elif isinstance(tree, dict):
        parts.append((dict, len(tree)))
        for key, item in tree.items():
            parts.append(key)
            scan(item, parts, tensors, values)
    elif isinstance(tree, Data):
        parts.append(type(tree))
        for item in attributes_of(tree).values():
            scan(item, parts, tensors, values)
    elif isinstance(tree, torch.device):
        parts.append(tree.type)
    elif isinstance(tree, slice):
        parts.append(slice)
        scan((tree.start, tree.stop, tree.step), parts, tensors)
    elif isinstance(tree, (torch.dtype, torch.layout, torch.memory_format)):
        parts.append(tree)
    else:
        parts.append(int(tree) if values and hasattr(type(tree), "__index__") else type(tree))


def after_writes(tensor: Tensor) -> Tensor:
    """``tensor`` after writes in place, which may have changed its shape; mostly ``tensor`` itself."""
    value = tensor._weft_value  # type: ignore[attr-defined]
    return tensor if value is None else value.data(tensor)


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype without data, on the meta device."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def hidden_in(tree: Any) -> list[Tensor]:
    """The tensors in the attributes of the opaque objects in ``tree``."""
    opaque = [thing for thing in opaque_objects(tree) if not isinstance(thing, Data)]
    return tensors_in(opaque, attributes=True)


def digest(name: str, parts: tuple[Any, ...]) -> int:
    """The same 63-bit number on every rank for the same signature."""
    text = name + repr([_plain(part) for part in parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _plain(part: Any) -> Any:
    if isinstance(part, type):
        return f"{part.__module__}.{part.__qualname__}"
    if isinstance(part, torch.Size):
        return list(part)
    if isinstance(part, (tuple, list)):
        return [_plain(item) for item in part]
    if isinstance(part, Tensor):
        return "tensor"
    return part if part is None or isinstance(part, (bool, int, str, float)) else str(part)


_names: dict[Any, str] = {}


def function_name(func: Callable[..., Any]) -> str:
    """A torch function's full name, the same on every rank."""
    name = _names.get(func)
    if name is None:
        name = _names[func] = _resolve(func)
    return name


def _resolve(func: Callable[..., Any]) -> str:
    try:
        name = resolve_name(func)
    except Exception:
        name = None
    if name is None:
        name = f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', type(func).__qualname__)}"
        owner = getattr(func, "__self__", None)
        name += "." + getattr(owner, "__name__", "") if owner is not None else ""
    return str(name)


class Watch:
    """Notes whether what runs inside reads values or has results whose shape depends on data."""

    active = False
    """True while some watch is on; of a rank's threads one runs at a time."""

    def __init__(self) -> None:
        self.dynamic = False

    def __enter__(self) -> Watch:
        Watch.active = True
        self._modes = ExitStack()
        self._modes.enter_context(_Operators(self))
        self._modes.enter_context(_Functions(self))
        return self

    def __exit__(self, *details: Any) -> None:
        self._modes.close()
        Watch.active = False


def unwatched(quick: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``quick``, and ``plain`` where somebody watches, whose operations ``quick`` would not show."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (plain if Watch.active else quick)(*args, **kwargs)

    return call


class _Functions(TorchFunctionMode):
    """Functions that read values without an operator: ``tolist``, ``numpy``, and sizes that are given as a tensor."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in READS
            or func in SHAPED_BY_TENSORS
            and any(isinstance(item, Tensor) for item in (*args[1:], *kwargs.values()))
        ):
            self.watch.dynamic = True
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    """Operators whose tags say that they read values, or that the shapes of their results depend on data."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first use would import the whole compiler: two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = func.tags
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            if func is not torch.ops.aten.index.Tensor or has_mask(args[1]):
                self.watch.dynamic = True
        return func(*args, **(kwargs or {}))


def has_mask(indices: Any) -> bool:
    """True if indexing with ``indices`` has a result whose size depends on their values."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def shapes_in(description: list[Any]) -> list[list[int]]:
    """The shapes of the tensors in a description, in order."""
    form = description[0]
    if form == "tensor":
        shape: list[int] = description[1][1]
        return [shape]
    if form == "sequence":
        return [shape for item in description[2] for shape in shapes_in(item)]
    if form == "dict":
        return [shape for _, item in description[2] for shape in shapes_in(item)]
    if form == "dataclass":
        return [shape for item in description[2].values() for shape in shapes_in(item)]
    return []


def meta_from(description: list[Any]) -> Tensor:
    """A tensor without data, on the meta device, from what ``description.describe_tensor`` says of one."""
    dtype, shape, strides, requires_grad = description
    dtype = getattr(torch, dtype)
    if strides is None:
        made = torch.empty(shape, dtype=dtype, device="meta")
    else:
        made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return made.requires_grad_() if requires_grad and torch.is_grad_enabled() else made
