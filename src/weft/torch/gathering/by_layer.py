"""Parameters that come layer by layer: they have values only while a layer runs that uses them.

    forward    a layer is entered     its parameters are gathered; they are given back when it is left
    backward   autograd asks for one  the layer's parameters are gathered; given back when it asks for another layer's

A *layer* is an element of a list of modules of one class, or what else a unit has. Autograd keeps no weight: it keeps
which one it is, by ``saved_tensors_hooks``, and asks when the backward pass comes there. So whatever else refers to
gathered memory keeps it, with the right numbers in it, and nothing that is read can be out of date.

A parameter stays the same object. While it is given back it has its shape, but every number in it is NaN, and modules
refuse to hand it out. One of whole numbers, or that is made of other tensors, is of a class that refuses to compute.
See ``docs/design/sharding.md``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from weft.torch.calls.interception import intercept, interceptor_of
from weft.torch.gathering.layers import Place
from weft.torch.gathering.saving import Saving, View
from weft.torch.pytorch.private import call_of, has_memory, no_torch_function, storage_key
from weft.torch.pytorch.torch_functions import METADATA
from weft.torch.session.offload import offloading
from weft.torch.tensors.cut_weights import guard, refuse_part
from weft.torch.tensors.marks import AWAY
from weft.torch.tensors.pytree import is_wrapped, plain_tensors_of, replace_inside, tensors_in


class Weight:
    """A parameter that is gathered with its layer.

    Attributes:
        nowhere: What it is made of while it is given back: one tensor, or several (a quantised weight).
        whole: What it is made of while it is here; nothing while it is given back.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, device: torch.device, shape: Sequence[int] | None = None
    ) -> None:
        """``shape``: that of the whole parameter, where the present one is a share."""
        self.name, self.parameter, self._device = name, parameter, device
        self.nowhere = self.without_values(shape)
        self.whole: Sequence[Tensor] = ()
        self._kind: Any = type(parameter)
        numbers = parameter.is_floating_point() or parameter.is_complex()
        self._away: Any = None if numbers and not is_wrapped(parameter) else _away(self._kind)

    def without_values(self, shape: Sequence[int] | None = None) -> list[Tensor]:
        """Tensors like those that the parameter is made of now, without their values."""
        parts = plain_tensors_of(self.parameter)
        return [_none(each.dtype, self._device).expand(shape or each.shape) for each in parts]

    def put_away(self) -> None:
        """Let the parameter have no values."""
        self.whole = ()
        self.put(self.nowhere)
        if self._away is not None:
            self.parameter.__class__ = self._away

    def put(self, parts: Sequence[Tensor]) -> None:
        """Let the parameter be made of these."""
        if self._away is not None:
            self.parameter.__class__ = self._kind
        if is_wrapped(self.parameter):
            values = iter(parts)
            replace_inside(self.parameter, lambda _: next(values))
        else:
            (self.parameter.data,) = parts


def _none(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number that stands for values that are not here."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), torch.nan, device=device).to(dtype)
    return torch.zeros((), dtype=dtype, device=device)


class Away(Tensor):
    """A weight while it is given back that cannot show it by NaN.

    A function that reads it in a backward pass, where autograd has kept the parameter itself, finds its values again.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA:
            for each in tensors_in((args, kwargs)):
                if isinstance(each, Away) and not getattr(each, AWAY).come():
                    refuse_part(each)
        with no_torch_function():
            return func(*args, **(kwargs or {}))


@functools.cache
def _away(kind: type[Tensor]) -> type[Tensor]:
    """The class of a weight of this class while it is given back."""
    return types.new_class(f"Away{kind.__name__}", (Away, kind))


W = TypeVar("W", bound=Weight)


class Source(Protocol[W]):
    """Where the values of layers come from, and where gradients go.

    Attributes:
        setting: What a script writes to do without it.
    """

    setting: str

    def gather(self, layer: Layer[W]) -> Iterable[Sequence[Tensor]]:
        """The tensors that each of the layer's weights is made of, on the device."""
        ...

    def give_back(self, layer: Layer[W]) -> None:
        """The layer is about to be given back."""
        ...

    def take_gradients(self, layer: Layer[W]) -> None:
        """The gradients of the layer that this backward pass has made are there."""
        ...


class Layer(Generic[W]):
    """Weights that are gathered together. ``rest``: what a unit has beside its layers."""

    def __init__(self, by_layer: ByLayer[W], number: int, name: str, rest: bool, weights: list[W]) -> None:
        self.by_layer, self.number, self.name, self.rest, self.weights = by_layer, number, name, rest, weights
        self.setting = by_layer.source.setting
        self.uses = 0
        """The number of its calls that run."""
        self.here = False

    def come(self) -> bool:
        """Its code reads a weight: in the backward pass an activation checkpoint may run a piece of it again."""
        if self.by_layer.backwards:
            self.by_layer.need(self)
        return self.here


class ByLayer(Generic[W]):
    """The layers of this rank's part of a model, whose parameters are gathered for each microbatch.

    Args:
        source: Where the values come from.
        places: The layers' modules.
        weights_of: What is gathered of a layer.

    Attributes:
        layers: The layers, in the order of the program.
        backwards: How many backward passes run on this rank; more than one where they wait in the middle.
    """

    def __init__(
        self, source: Source[W], places: Iterable[Place], weights_of: Callable[[Place], list[W]]
    ) -> None:
        self.source = source
        self.layers: list[Layer[W]] = []
        self.backwards = self._later = 0
        self._in_step = False
        self._latest: dict[bool, Layer[W]] = {}
        self._by_memory: dict[int, tuple[Layer[W], W, int]] = {}
        self._by_parameter: dict[int, Layer[W]] = {}
        for place in places:
            self._add(place, weights_of(place))
        self.weights = [weight for layer in self.layers for weight in layer.weights]
        self._saving = Saving(self._pack, self._unpack)

    def _add(self, place: Place, weights: list[W]) -> None:
        """Make a layer, and stand around its module's calls."""
        if not weights:
            return
        layer = Layer(self, len(self.layers), place.name or "the model", place.rest, weights)
        self.layers.append(layer)
        own = {id(weight.parameter) for weight in weights}
        self._by_parameter |= dict.fromkeys(own, layer)
        for part in place.module.modules():
            if any(id(parameter) in own for parameter in part.parameters(recurse=False)):
                guard(part)
        call, run = interceptor_of(place.module), partial(self._run, layer)
        if call is not None:  # a unit's
            call.around = run
        else:
            intercept(place.module, partial(run, call_of(place.module)))

    def layer_of(self, parameter: Tensor) -> Layer[W] | None:
        """The layer that the parameter is gathered with, if it is."""
        return self._by_parameter.get(id(parameter))

    # --- a step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: parameters have their shapes, and no values until their layers run."""
        self._in_step = True
        for layer in self.layers:
            for weight in layer.weights:
                self._away(layer, weight)

    def end(self) -> None:
        """The step ends: no layer is here, and whoever holds the values puts them into the parameters."""
        for layer in self.layers:
            layer.uses = 0
            self._give_back(layer)
        for weight in self.weights:
            setattr(weight.parameter, AWAY, None)
        self._in_step = False

    # --- layers come and go -----------------------------------------------------------------------------------

    def _run(self, layer: Layer[W], inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the module of a layer, which ``inner`` does, with its parameters."""
        if not self._in_step:
            return inner(*args, **kwargs)
        self.need(layer)
        layer.uses += 1
        try:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with offloading(), self._saving.inside():
                return inner(*args, **kwargs)
        finally:
            layer.uses -= 1
            if not layer.uses and not self.backwards:
                self._give_back(layer)

    def need(self, layer: Layer[W]) -> None:
        """Let the layer have its parameters. In a backward pass the one before, which is done, gives back its own."""
        if self.backwards:
            before = self._latest.get(layer.rest)
            if before is not layer:
                if before is not None:
                    self._let_go(before)
                self._latest[layer.rest] = layer
        if not layer.here:
            self._gather(layer)

    def _let_go(self, layer: Layer[W]) -> None:
        if not self._later:
            self.source.take_gradients(layer)
        if not layer.uses:
            self._give_back(layer)

    @torch.no_grad()
    def _gather(self, layer: Layer[W]) -> None:
        for weight, whole in zip(layer.weights, self.source.gather(layer), strict=True):
            weight.whole = whole
            weight.put(whole)
            setattr(weight.parameter, AWAY, None)
            for number, part in enumerate(whole):
                self._by_memory[storage_key(part)] = layer, weight, number
        layer.here = True

    def _give_back(self, layer: Layer[W]) -> None:
        if not layer.here:
            return
        self.source.give_back(layer)
        for weight in layer.weights:
            for part in weight.whole:
                del self._by_memory[storage_key(part)]
            self._away(layer, weight)
        layer.here = False

    def _away(self, layer: Layer[W], weight: W) -> None:
        weight.put_away()
        setattr(weight.parameter, AWAY, layer)

    # --- the backward pass ------------------------------------------------------------------------------------

    @contextmanager
    def backward(self, later: bool) -> Iterator[None]:
        """Around autograd's run. ``later``: gradients of weights come later, see ``weight_gradients.run_by_layer``."""
        self.backwards += 1
        self._later += later
        try:
            yield
            latest, self._latest = self._latest, {}
            for layer in latest.values():
                self._let_go(layer)
            if not self._later:
                self.take_all_gradients()
        finally:
            self.backwards -= 1
            self._later -= later

    def take_gradients(self, layer: Layer[W]) -> None:
        """The gradients of a layer are there."""
        self.source.take_gradients(layer)

    def take_all_gradients(self) -> None:
        """So are those of all layers that have some."""
        for layer in self.layers:
            self.source.take_gradients(layer)

    def _pack(self, tensor: Tensor) -> View | None:
        """The view that autograd is to keep of a weight; None for any other tensor."""
        if type(tensor) not in (Tensor, nn.Parameter) or not has_memory(tensor):
            return None
        found = self._by_memory.get(storage_key(tensor))
        if found is None or found[1].whole[found[2]].dtype != tensor.dtype:
            return None
        return View(found, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, view: View) -> Tensor:
        layer, weight, number = view.of
        self.need(layer)
        return weight.whole[number].as_strided(view.size, view.stride, view.offset)
