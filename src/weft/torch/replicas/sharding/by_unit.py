"""Parameters that replicas share, gathered for each microbatch: whole only while a layer runs that uses them.

    forward    a layer is entered     its parameters are gathered; they are given back when it is left
    backward   autograd asks for one  the layer's parameters are gathered; given back when it asks for another layer's
               ... and gradients      go to shares of their sums over the replicas as the layer is given back
    W          gradients for later    go to shares layer by layer

A *layer* is an element of a list of modules of one class, or what else a unit has. Autograd keeps no weight: it keeps
which one it is, by ``saved_tensors_hooks``, and asks when the backward pass comes there. So whatever else refers to
gathered memory keeps it, with the right numbers in it, and nothing that is read can be out of date.

A parameter stays the same object. While it is given back it has its shape, but every number in it is NaN, and modules
refuse to hand it out. See ``docs/design/sharding.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import UsageError
from weft.runtime.lockstep import LockstepOrder
from weft.torch.calls.interception import intercept, interceptor_of
from weft.torch.pytorch.private import (
    call_of,
    has_memory,
    storage_key,
)
from weft.torch.replicas.sharding.collectives import ShardingGroup
from weft.torch.replicas.sharding.layers import Place, places_of
from weft.torch.replicas.sharding.saving import Saving, View
from weft.torch.session.offload import offloading
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Cut
from weft.torch.tensor_parallel.cuts import mark, unmark
from weft.torch.tensors.cut_weights import guard
from weft.torch.tensors.marks import AWAY

MESSAGE_BYTES = 25 << 20


class Weight:
    """A parameter that is gathered with its layer.

    Attributes:
        share: In a step, this rank's share of it.
        kept: In a step, the gradient that its share had before.
        sum: This rank's share of the gradients of this step, averaged over the replicas.
        grown: Whether this rank has had a gradient of it in this step.
        whole: Its values, while they are here.
    """

    def __init__(self, name: str, parameter: nn.Parameter, how: Cut) -> None:
        self.name, self.parameter, self.how = name, parameter, how
        self.share = self.kept = self.sum = self.whole = None
        self.grown = False
        self.nowhere = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)

    share: Tensor | None
    kept: Tensor | None
    sum: Tensor | None
    whole: Tensor | None


class Layer:
    """Weights that are gathered together. ``rest``: what a unit has beside its layers."""

    def __init__(self, units: Units, number: int, name: str, rest: bool, weights: list[Weight]) -> None:
        self.units, self.number, self.name, self.rest, self.weights = units, number, name, rest, weights
        self.uses = 0
        """How many calls of it run."""
        self.here = False

    def come(self) -> bool:
        """Its code reads a weight: in the backward pass an activation checkpoint may run a piece of it again."""
        if self.units.backwards:
            self.units.need(self)
        return self.here

    def run(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the layer's module, which ``inner`` does."""
        return self.units.run(self, inner, args, kwargs)


class Units:
    """The layers of this rank's part of a model, whose parameters are gathered for each microbatch.

    Args:
        session: The session.
        model: The model, which has been split.
        cuts: Its parameters that can be shared, by name, and how.
        sharding_group: The ranks that hold shards of them.

    Attributes:
        layers: The layers, in the order of the program.
        backwards: How many backward passes run on this rank; more than one where they wait in the middle.
        trained: Whether there was a gradient in this step.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        cuts: Sequence[tuple[str, nn.Parameter, Cut]],
        sharding_group: ShardingGroup,
    ) -> None:
        self._session, self._sharding_group = session, sharding_group
        self.layers: list[Layer] = []
        self.backwards = self._later = 0
        self._latest: dict[bool, Layer] = {}
        self._by_memory: dict[int, tuple[Layer, Weight]] = {}
        self._by_parameter: dict[int, Layer] = {}
        self.trained = False
        found = {id(p): (name, p, how) for name, p, how in cuts if p.is_floating_point()}
        for place in places_of(model.module, model.plan, session.position("pp")):
            self._add(place, found)
        self._weights = [(layer, weight) for layer in self.layers for weight in layer.weights]
        ranks, degree = session.peers("rdp"), sharding_group.size
        self._column: Any = None
        if self._weights and degree < len(ranks):  # others have the same share
            self._column = dist.new_group(
                ranks[sharding_group.rank :: degree], session.timeout, "nccl" if session.nccl else "gloo",
                use_local_synchronization=True,
            )  # fmt: skip

        self._saving = Saving(self._pack, self._unpack)

    def _add(self, place: Place, cuts: dict[int, tuple[str, nn.Parameter, Cut]]) -> None:
        """Make a layer, and stand around its module's calls."""
        weights = [Weight(*cuts[id(parameter)]) for parameter in place.parameters if id(parameter) in cuts]
        if not weights:
            return
        layer = Layer(self, len(self.layers), place.name or "the model", place.rest, weights)
        self.layers.append(layer)
        own = {id(weight.parameter) for weight in weights}
        self._by_parameter |= dict.fromkeys(own, layer)
        for part in place.module.modules():
            if any(id(parameter) in own for parameter in part.parameters(recurse=False)):
                guard(part)
        call = interceptor_of(place.module)
        if call is not None:  # a unit's
            call.around = layer.run
        else:
            intercept(place.module, partial(layer.run, call_of(place.module)))

    def has(self, parameter: Tensor) -> bool:
        """True if the parameter is gathered with a layer."""
        return id(parameter) in self._by_parameter

    # --- a step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: parameters have their shapes, and no values until their layers run."""
        self.trained = False
        for layer, weight in self._weights:
            parameter = weight.parameter
            weight.share, weight.kept, parameter.grad = parameter.data, parameter.grad, None
            weight.grown = False
            unmark(parameter)
            self._give_back_one(layer, weight)

    @torch.no_grad()
    def end(self) -> None:
        """The step ends: parameters are shares, and so are the averages of their gradients; collective."""
        if not self._weights:
            return
        present = torch.tensor([weight.grown for _, weight in self._weights], dtype=torch.int32)
        dist.all_reduce(present, group=self._session.group("rdp"))
        had = [weight for (_, weight), count in zip(self._weights, present.tolist(), strict=True) if count]
        if self._column is not None:
            self._average_over_rows(had)
        for layer in self.layers:
            layer.uses = 0
            self._give_back(layer)
        for _, weight in self._weights:
            parameter = weight.parameter
            if parameter.grad is not None:
                raise UsageError(
                    f"{weight.name} has a gradient after the backward passes of all microbatches, which replicas have "
                    'not averaged: write "sharded_parameters_gathered": "step"'
                )
            assert weight.share is not None
            parameter.data = weight.share
            setattr(parameter, AWAY, None)
            mark(parameter, weight.how, self._sharding_group)
            kept = weight.kept
            if weight in had and weight.sum is not None:
                kept = weight.sum if kept is None else kept.add_(weight.sum)
            parameter.grad = kept
            weight.share = weight.kept = weight.sum = None

    def _average_over_rows(self, weights: Sequence[Weight]) -> None:
        """All-reduce the sums of ranks that hold the same shard."""
        sums: list[Tensor] = []
        for weight in weights:
            if weight.sum is None:
                assert weight.share is not None
                weight.sum = torch.zeros_like(weight.share)
            sums.append(weight.sum)
        for dtype in {each.dtype for each in sums}:
            same = [each for each in sums if each.dtype == dtype]
            while same:
                sizes = list(itertools.accumulate(each.nbytes for each in same))
                count = max(1, sum(size <= MESSAGE_BYTES for size in sizes))
                some, same = same[:count], same[count:]
                flat = torch.cat([each.view(-1) for each in some])
                dist.all_reduce(flat, group=self._column)
                for each, part in zip(some, flat.split([each.numel() for each in some]), strict=True):
                    each.copy_(part.view(each.shape))

    # --- layers come and go -----------------------------------------------------------------------------------

    def run(self, layer: Layer, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the module of a layer, with its parameters."""
        if layer.weights[0].share is None:  # outside of a step
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

    def need(self, layer: Layer) -> None:
        """Let the layer have its parameters. In a backward pass the one before, which is done, gives back its own."""
        if self.backwards:
            before = self._latest.get(layer.rest)
            if before is not layer:
                if before is not None:
                    self._let_go(before)
                self._latest[layer.rest] = layer
        if not layer.here:
            self._gather(layer)

    def _let_go(self, layer: Layer) -> None:
        if not self._later:
            self.reduce_scatter(layer)
        if not layer.uses:
            self._give_back(layer)

    @torch.no_grad()
    def _gather(self, layer: Layer) -> None:
        self._turns.agree(f"gathers the parameters of {layer.name}")
        shares = [weight.share for weight in layer.weights if weight.share is not None]
        full_tensors = self._sharding_group.all_gather(shares, [weight.how for weight in layer.weights])
        for weight, whole in zip(layer.weights, full_tensors, strict=True):
            weight.parameter.data = weight.whole = whole
            setattr(weight.parameter, AWAY, None)
            self._by_memory[storage_key(whole)] = layer, weight
        layer.here = True

    def _give_back(self, layer: Layer) -> None:
        if not layer.here:
            return
        for weight in layer.weights:
            assert weight.whole is not None
            del self._by_memory[storage_key(weight.whole)]
            self._give_back_one(layer, weight)
        layer.here = False

    def _give_back_one(self, layer: Layer, weight: Weight) -> None:
        weight.whole = None
        weight.parameter.data = weight.nowhere.expand(weight.how.shape)
        setattr(weight.parameter, AWAY, layer)

    @torch.no_grad()
    def reduce_scatter(self, layer: Layer) -> None:
        """Gradients that have grown become a part of the shares' sums; whole ones are gone."""
        weights = [weight for weight in layer.weights if weight.parameter.requires_grad]
        if all(weight.parameter.grad is None for weight in weights):
            return
        self._turns.agree(f"reduce-scatters the gradients of {layer.name}")
        self.trained = True
        scale = 1.0 / self._session.mesh.rdp
        full_tensors: list[Tensor | None] = []
        for weight in weights:
            grad, weight.parameter.grad = weight.parameter.grad, None
            if grad is not None and grad.is_sparse:
                raise UsageError(
                    f"{weight.name} has a sparse gradient, of which replicas cannot keep shares: give its module "
                    'sparse=True before the model is wrapped, or write "sharded_data_parallel_degree": 1'
                )
            weight.grown |= grad is not None
            full_tensors.append(None if grad is None else grad * scale)
            del grad
        shares = [weight.share for weight in weights if weight.share is not None]
        sums = self._sharding_group.reduce_scatter(full_tensors, shares, [weight.how for weight in weights])
        for weight, each in zip(weights, sums, strict=True):
            weight.sum = each if weight.sum is None else weight.sum.add_(each)

    @property
    def _turns(self) -> LockstepOrder:
        assert self._session.executor is not None and self._session.executor.turns is not None
        return self._session.executor.turns

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
                self.reduce_scatter_all()
        finally:
            self.backwards -= 1
            self._later -= later

    def reduce_scatter_all(self) -> None:
        """Add up whatever gradients are there."""
        for layer in self.layers:
            self.reduce_scatter(layer)

    def layer_of(self, parameter: Tensor) -> Layer | None:
        """The layer that the parameter is gathered with, if it is."""
        return self._by_parameter.get(id(parameter))

    def _pack(self, tensor: Tensor) -> View | None:
        """The view that autograd is to keep of a weight; None for any other tensor."""
        if type(tensor) not in (Tensor, nn.Parameter) or not has_memory(tensor):
            return None
        found = self._by_memory.get(storage_key(tensor))
        if found is None or found[1].parameter.dtype != tensor.dtype:
            return None
        return View(found, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, view: View) -> Tensor:
        layer, weight = view.of
        self.need(layer)
        assert weight.whole is not None
        return weight.whole.as_strided(view.size, view.stride, view.offset)
