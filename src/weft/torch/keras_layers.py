"""Models of Keras on PyTorch as trees of modules, which is what can be split.

Keras gives a model the parameters of all its layers, and knows layers in lists, as those of a functional model are, as
no submodules. So a whole model would be one unit. Here each layer has its own parameters, and is a submodule of the
layer around it; what it changes in its forward pass (means of BatchNorm, states of random seeds) are buffers. Variables
of Keras hold their tensors by themselves; they read them out of the module from now on, where a part of the model that
lies elsewhere has none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from weft.errors import UsageError
from weft.torch.tensors.marks import FOLLOWS, PLACE


def is_of_keras(module: Any) -> bool:
    """True if this is a layer or a model of Keras, on any of its backends."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(module, keras.layers.Layer)


@contextmanager
def layers_evaluate() -> Iterator[None]:
    """Inside, layers of Keras that are asked to train do not, as modules in evaluation mode."""
    keras = sys.modules.get("keras")
    if keras is None:
        yield
        return
    base = keras.layers.Layer
    original = base.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("training") is not None:
            kwargs["training"] = False
        return original(self, *args, **kwargs)

    base.__call__ = call
    try:
        yield
    finally:
        base.__call__ = original


def open_layers(module: nn.Module) -> None:
    """Make the layers of Keras in a module submodules with parameters of their own.

    Raises:
        UsageError: One has no variables yet.
    """
    seen: set[int] = set()
    for each in list(module.modules()):
        if is_of_keras(each):
            _open(each, seen)


def _open(layer: Any, seen: set[int]) -> None:
    if id(layer) in seen:
        return
    seen.add(id(layer))
    if not layer.built:
        raise UsageError(
            f"{layer.name} is of Keras and has no variables yet: call the model with an example before it is wrapped"
        )
    graph = getattr(layer, "_functional", None)  # the layers of a Sequential, in a model of its own
    parts = list(layer._layers) if graph is None else [graph]
    for part in parts:
        _open(part, seen)
    inside = {id(variable) for part in parts for variable in part.variables}
    own = {id(each): each for each in layer.variables if id(each) not in inside}
    trained = {id(each) for each in layer._trainable_variables}
    layer._torch_params = nn.ParameterDict(
        {each.path: each.value for key, each in own.items() if key in trained}
    )
    for key, variable in own.items():
        if key in trained:
            _follow(variable, layer._torch_params, variable.path)
        else:
            name = variable.path.replace(".", "_")
            layer.register_buffer(name, variable.value.detach())
            _follow(variable, layer, name)
    for number, part in enumerate(parts):
        if not any(part is each for each in layer._modules.values()):
            name = part.name.replace(".", "_")
            layer.add_module(f"{name}_{number}" if name in layer._modules else name, part)


def _follow(variable: Any, holder: nn.Module, name: str) -> None:
    """Let a variable be the parameter or the buffer that a module has under a name."""
    variable.__dict__.pop("_value", None)
    variable.__dict__[PLACE] = holder, name
    kind: Any = type(variable)
    variable.__class__ = _following(kind)


@functools.cache
def _following(kind: type) -> type:
    """The class of variables that read their value out of a module."""
    if hasattr(kind, FOLLOWS):
        return kind

    def read(self: Any) -> Any:
        holder, name = self.__dict__[PLACE]
        return getattr(holder, name)

    def write(self: Any, value: Any) -> None:
        holder, name = self.__dict__[PLACE]
        setattr(holder, name, value)

    return type(kind.__name__, (kind,), {"_value": property(read, write), FOLLOWS: True})
