"""Nested structures for other ranks: a rank describes what a call returns, the others build the same.

A description is JSON: a list whose first item names the form. An object that is no container can be described only
if the other ranks hold the same object already, because it came in as an argument.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.torch.tensors.pytree import (
    CONSTANTS,
    attributes_of,
    opaque_objects,
    rebuild_dataclass,
    rebuild_dict,
    rebuild_sequence,
)


class Describer:
    """Turns what a call returns into descriptions.

    ``inputs``: the arguments of the call; an object that is passed through is described by its number among them.
    ``tensors``: the tensors that were described, in order of appearance. ``shared``: whether other ranks will build it;
    else any object may be in there.
    """

    def __init__(self, inputs: Any, shared: bool = True) -> None:
        self._shared = shared
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._opaque = {id(thing): number for number, thing in enumerate(opaque_objects(inputs))}

    def describe(self, tree: Any) -> list[Any]:
        """The description of a structure; `UsageError` for objects that other ranks cannot build."""
        if isinstance(tree, Tensor):
            number = self._numbers.get(id(tree))
            if number is not None:
                return ["same", number]
            self._numbers[id(tree)] = len(self.tensors)
            self.tensors.append(tree)
            return ["tensor", describe_tensor(tree)]
        if isinstance(tree, torch.Size):
            return ["size", list(tree)]
        if isinstance(tree, CONSTANTS):
            return ["constant", tree]
        if isinstance(tree, (list, tuple)):
            items = [self.describe(item) for item in tree]
            return ["sequence", class_name(type(tree)), items]
        if isinstance(tree, dict):
            return [
                "dict",
                class_name(type(tree)),
                [[self.describe(key), self.describe(item)] for key, item in tree.items()],
            ]
        if id(tree) in self._opaque:
            return ["input", self._opaque[id(tree)]]
        if isinstance(tree, (torch.dtype, torch.device)):
            return ["torch", type(tree).__name__, str(tree)]
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            named = {name: self.describe(item) for name, item in attributes_of(tree).items()}
            return ["dataclass", class_name(type(tree)), named]
        if not self._shared:
            return ["constant", None]
        raise UsageError(
            f"returns a {type(tree).__qualname__}, which cannot be described to the other ranks; return tensors, "
            "numbers, strings, lists, tuples, dicts or dataclasses of these, or keep the module that calls it "
            "in one piece: weft.set_partition(parent, index)"
        )


def describe_tensor(tensor: Tensor) -> list[Any]:
    """[dtype, shape, strides, whether it needs a gradient] of ``tensor``."""
    if tensor.is_nested:
        raise UsageError(
            "returns a nested tensor, which cannot be described to the other ranks: return its values() and offsets(), "
            "or keep the module that calls it in one piece: weft.set_partition(parent, index)"
        )
    strides = list(tensor.stride()) if tensor.layout == torch.strided else None
    return [str(tensor.dtype)[6:], list(tensor.shape), strides, tensor.requires_grad]


def build(
    description: list[Any], tensors: list[Tensor], make: Callable[[list[Any]], Tensor], inputs: Any
) -> Any:
    """The structure that ``description`` describes.

    Args:
        description: What `Describer.describe` gave on another rank.
        tensors: Tensors that were made so far; new ones are appended, in the describer's order.
        make: Gives a tensor for the description of one.
        inputs: The arguments of the same call on this rank.
    """
    form = description[0]
    if form == "tensor":
        tensors.append(make(description[1]))
        return tensors[-1]
    if form == "same":
        return tensors[description[1]]
    if form == "constant":
        return description[1]
    if form == "size":
        return torch.Size(description[1])
    if form == "sequence":
        items = [build(item, tensors, make, inputs) for item in description[2]]
        return rebuild_sequence(find_class(description[1], (list, tuple)), items)
    if form == "dict":
        values = {
            build(key, tensors, make, inputs): build(item, tensors, make, inputs)
            for key, item in description[2]
        }
        return rebuild_dict(find_class(description[1], (dict,)), values)
    if form == "input":
        return opaque_objects(inputs)[description[1]]
    if form == "torch":
        return _device(description[2]) if description[1] == "device" else getattr(torch, description[2][6:])
    values = {name: build(item, tensors, make, inputs) for name, item in description[2].items()}
    return rebuild_dataclass(find_class(description[1], (object,)), values)


def _device(name: str) -> torch.device:
    """The device of that kind on this rank: GPUs have other numbers on other ranks."""
    device = torch.device(name)
    if device.type != "cuda" or device.index is None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def class_name(kind: type) -> str:
    """The name by which `find_class` finds a class on another rank."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str, bases: tuple[type, ...]) -> type:
    """The class of a name, if its module has been imported on this rank; nothing is imported for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, bases):
        raise UsageError(
            f"a module on another rank returned a {path} of {module}, which this rank does not know: "
            "define it at the top level of a module that every rank imports"
        )
    return found
