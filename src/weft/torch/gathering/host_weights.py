"""Weights in host memory: those of a layer are on the device while it runs, see ``by_layer``.

    a step           a layer is entered, or autograd asks for it: its weights are copied to the device, and behind
                     them those of the layer that came next the last time; they are let go as the layer is given back
    between steps    what lies on the host is the parameters' data: it is read, written, saved and loaded as ever
    an optimizer     parameters with a gradient are on the device while its ``step()`` runs

See ``docs/design/sharding.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.torch.gathering.by_layer import ByLayer, Layer, Weight
from weft.torch.gathering.layers import Place, places_of
from weft.torch.offload.host_memory import HostMemory, tensor_in
from weft.torch.pytorch.private import version
from weft.torch.tensors.pytree import bytes_of, is_wrapped, plain_tensors_of, replace_inside

LEAST_BYTES = 64 << 10
"""A parameter below this stays on the device: a bias, a norm."""
LAYERS_IN_USE = 2
"""A copy to a GPU begins when it is through with all but so many of the layers that were given back."""


class HostWeight(Weight):
    """A parameter that waits in host memory.

    Attributes:
        homes: What it is made of there.
        written: While a layer that has it runs, how often it had been written when it came.
        held: How it is on the device between steps, "with values" or "without values"; empty: it is not.
    """

    homes: Sequence[Tensor] = ()  # of another shape or dtype where the script has replaced the values
    written = 0
    held = ""


class _Copied(NamedTuple):
    """The weights of a layer on the device, as soon as ``event`` has happened."""

    weights: list[list[Tensor]]
    event: Any


class HostWeights:
    """The weights of this rank's part of a model, in host memory.

    Args:
        root: The model, which has been split.
        plan: How it was split.
        here: This rank's partition.
        device: Where it computes.
    """

    setting = '"offload_weights": false'

    def __init__(self, root: nn.Module, plan: Any, here: int, device: torch.device) -> None:
        self._device = device
        self._memory = HostMemory(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: dict[int, _Copied] = {}
        self._given_back: deque[Any] = deque()
        self._before: tuple[bool, int] | None = None
        self._next: dict[tuple[bool, int], Layer[HostWeight]] = {}
        """The layer that came after another one the last time, in forward passes and in backward passes."""
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        alone = {id(parameter) for parameter in root.parameters() if bytes_of(parameter) >= LEAST_BYTES}
        alone -= _with_shared_memory(root)

        def weights_of(place: Place) -> list[HostWeight]:
            return [HostWeight(names[id(p)], p, device) for p in place.parameters if id(p) in alone]

        self.by_layer: ByLayer[HostWeight] = ByLayer(self, places_of(root, plan, here), weights_of)
        self._weights = {id(weight.parameter): weight for weight in self.by_layer.weights}
        for weight in self.by_layer.weights:
            self._put_away(weight)
        for parameter in root.parameters():  # of a model that was too large to be on the device
            if parameter.device != device and id(parameter) not in self._weights:
                _move(parameter, device)
        if self._stream is not None:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _put_away(self, weight: HostWeight) -> None:
        """Let the parameter be in host memory, with the values that it has, if it has any."""
        parts = [*plain_tensors_of(weight.parameter)]
        if list(map(_kind, parts)) != list(map(_kind, weight.homes)):
            weight.homes = [tensor_in(self._memory.take(part.nbytes), part) for part in parts]
            weight.nowhere = weight.without_values()
        for part, home, nowhere in zip(parts, weight.homes, weight.nowhere, strict=True):
            if part.data_ptr() not in (home.data_ptr(), nowhere.data_ptr()):
                home.copy_(part)
            self._memory.page_out(home.untyped_storage())
        weight.put(weight.nowhere if weight.held else weight.homes)

    # --- a step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: parameters are on the device from now on, and have values where they are needed."""
        for weight in self.by_layer.weights:
            self._put_away(weight)
        self.by_layer.begin()

    def end(self) -> None:
        """The step ends: parameters are in host memory, their gradients where they are."""
        self.by_layer.end()
        self._copied.clear()
        if self._stream is not None:  # a script may write host memory now
            self._stream.synchronize()
        for weight in self.by_layer.weights:
            weight.put(weight.homes)

    def gather(self, layer: Layer[HostWeight]) -> list[list[Tensor]]:
        """The layer's weights on the device; a copy of those that came next the last time begins."""
        found = self._copied.pop(layer.number, None) or self._copy(layer)
        self._copied.clear()
        key = self.by_layer.backwards > 0, layer.number
        if self._before is not None:
            self._next[self._before] = layer
        self._before, following = key, self._next.get(key)
        if following is not None and following is not layer and not following.here:
            self._copy_ahead(following)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(found.event)
            for part in (part for parts in found.weights for part in parts):
                part.record_stream(current)
        for weight in layer.weights:
            weight.written = version(weight.parameter)
        return found.weights

    def _copy_ahead(self, layer: Layer[HostWeight]) -> None:
        if self._stream is not None:
            self._copied[layer.number] = self._copy(layer)
            return
        for weight in layer.weights:
            for home in weight.homes:
                self._memory.page_in(home.untyped_storage())

    def _copy(self, layer: Layer[HostWeight]) -> _Copied:
        if self._stream is None:
            found = [[home.clone() for home in weight.homes] for weight in layer.weights]
            for weight in layer.weights:
                for home in weight.homes:
                    self._memory.page_out(home.untyped_storage())
            return _Copied(found, None)
        while len(self._given_back) > LAYERS_IN_USE:  # or a host that is ahead would take memory for them all
            given_back = self._given_back.popleft()
            if not given_back.query():
                given_back.synchronize()
        with torch.cuda.stream(self._stream):
            found = [
                [home.to(self._device, non_blocking=True) for home in weight.homes]
                for weight in layer.weights
            ]
            return _Copied(found, self._stream.record_event())

    @torch.no_grad()
    def give_back(self, layer: Layer[HostWeight]) -> None:
        """Keep what the layer's code has written into its weights."""
        for weight in layer.weights:
            parts = [*plain_tensors_of(weight.parameter)]
            replaced = any(
                part.data_ptr() != whole.data_ptr() for part, whole in zip(parts, weight.whole, strict=True)
            )
            if replaced or version(weight.parameter) != weight.written:
                self._put_away(weight)
        if self._stream is not None:
            self._given_back.append(torch.cuda.current_stream(self._device).record_event())

    def take_gradients(self, layer: Layer[HostWeight]) -> None:
        """They stay on the device."""

    # --- an optimizer -----------------------------------------------------------------------------------------

    @contextmanager
    def on_device(self, parameters: Iterable[Tensor], values: bool) -> Iterator[None]:
        """Inside, these parameters are on the device, as their gradients are. ``values``: with their values; otherwise
        they have some from :meth:`bring` to :meth:`take_back`."""
        weights = [*self._those_of(parameters)] if values or self._stream is not None else []
        before = [weight.held for weight in weights]
        for weight in weights:
            weight.held = "with values" if values else "without values"
            if values:
                self._bring(weight)
            else:
                weight.put(weight.nowhere)
        try:
            yield
        finally:
            for weight, held in zip(weights, before, strict=True):
                weight.held = held
                self._put_away(weight)

    def bring(self, parameters: Iterable[Tensor]) -> None:
        """Let these parameters be on the device, with their values."""
        for weight in self._those_of(parameters):
            if weight.held != "with values":
                self._bring(weight)

    def take_back(self, parameters: Iterable[Tensor]) -> None:
        """Keep the values of these parameters in host memory again."""
        for weight in self._those_of(parameters):
            if weight.held != "with values":
                self._put_away(weight)

    @torch.no_grad()
    def _bring(self, weight: HostWeight) -> None:
        if self._stream is not None:  # a CPU reads them where they are
            weight.put([home.to(self._device, non_blocking=True) for home in weight.homes])

    def _those_of(self, parameters: Iterable[Tensor]) -> Iterator[HostWeight]:
        return (self._weights[id(each)] for each in parameters if id(each) in self._weights)


def waiting_bytes(root: nn.Module, plan: Any, here: int) -> list[int]:
    """The bytes of each layer's weights on partition ``here`` that can wait, of a model that is only planned."""
    sizes = [[bytes_of(each) for each in place.parameters] for place in places_of(root, plan, here)]
    return [sum(size for size in layer if size >= LEAST_BYTES) for layer in sizes]


def _with_shared_memory(root: nn.Module) -> set[int]:
    """The ids of parameters that cannot wait elsewhere: other tensors look at their memory, or it has gaps."""
    spans: list[tuple[int, int, int]] = []
    left = set()
    for tensor in (*root.parameters(), *root.buffers()):
        for part in plain_tensors_of(tensor):
            if part.layout != torch.strided or part.is_meta or not _is_dense(part):
                left.add(id(tensor))
            else:
                spans.append((part.data_ptr(), part.data_ptr() + part.nbytes, id(tensor)))
    latest, of = 0, 0
    for begin, end, which in sorted(spans):
        if begin < latest and which != of:
            left |= {which, of}
        if end > latest:
            latest, of = end, which
    return left


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    if is_wrapped(parameter):
        replace_inside(parameter, lambda part: part.to(device))
    else:
        parameter.data = parameter.data.to(device)


def _is_dense(tensor: Tensor) -> bool:
    """True if its memory has no gaps, and no number in it is seen twice."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
