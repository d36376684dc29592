"""Parameters that replicas share, gathered for each microbatch: whole only while a layer runs that uses them.

    forward    a layer is entered     its parameters are all-gathered; see ``weft.torch.gathering.by_layer``
    backward   a layer is left        its gradients go to shares of their sums over the replicas
    W          gradients for later    go to shares layer by layer

See ``docs/design/sharding.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import UsageError
from weft.runtime.lockstep import LockstepOrder
from weft.torch.gathering.by_layer import ByLayer, Layer, Weight
from weft.torch.gathering.layers import Place, places_of
from weft.torch.replicas.sharding.collectives import ShardingGroup
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Cut
from weft.torch.tensor_parallel.cuts import mark, unmark
from weft.torch.tensors.shards import resize

MESSAGE_BYTES = 25 << 20


class SharedWeight(Weight):
    """A parameter of which this rank has a share.

    Attributes:
        share: In a step, this rank's share of it.
        kept: In a step, the gradient that its share had before.
        sum: This rank's share of the gradients of this step, averaged over the replicas.
        grown: Whether this rank has had a gradient of it in this step.
    """

    def __init__(self, name: str, parameter: nn.Parameter, how: Cut) -> None:
        super().__init__(name, parameter, parameter.device, how.shape)
        self.how = how
        self.share = self.kept = self.sum = None
        self.grown = False

    share: Tensor | None
    kept: Tensor | None
    sum: Tensor | None


class Units:
    """The layers of this rank's part of a model, whose parameters are all-gathered for each microbatch.

    Args:
        session: The session.
        model: The model, which has been split.
        cuts: Its parameters that can be shared, by name, and how.
        sharding_group: The ranks that hold shards of them.

    Attributes:
        by_layer: The layers, in the order of the program.
        trained: Whether there was a gradient in this step.
    """

    setting = '"sharded_parameters_gathered": "step"'

    def __init__(
        self,
        session: Session,
        model: Any,
        cuts: Sequence[tuple[str, nn.Parameter, Cut]],
        sharding_group: ShardingGroup,
    ) -> None:
        self._session, self._sharding_group = session, sharding_group
        self.trained = False
        found = {id(p): (name, p, how) for name, p, how in cuts if p.is_floating_point()}

        def weights_of(place: Place) -> list[SharedWeight]:
            return [SharedWeight(*found[id(each)]) for each in place.parameters if id(each) in found]

        places = places_of(model.module, model.plan, session.position("pp"))
        self.by_layer: ByLayer[SharedWeight] = ByLayer(self, places, weights_of)
        ranks, degree = session.peers("rdp"), sharding_group.size
        self._column: Any = None
        if self.by_layer.weights and degree < len(ranks):  # others have the same share
            self._column = dist.new_group(
                ranks[sharding_group.rank :: degree], session.timeout, "nccl" if session.nccl else "gloo",
                use_local_synchronization=True,
            )  # fmt: skip

    def has(self, parameter: Tensor) -> bool:
        """True if the parameter is gathered with a layer."""
        return self.by_layer.layer_of(parameter) is not None

    def begin(self) -> None:
        """A step begins."""
        self.trained = False
        for weight in self.by_layer.weights:
            parameter = weight.parameter
            weight.share, weight.kept, parameter.grad = parameter.data, parameter.grad, None
            weight.grown = False
            unmark(parameter)
        self.by_layer.begin()

    @torch.no_grad()
    def end(self) -> None:
        """The step ends: parameters are shares, and so are the averages of their gradients; collective."""
        if not self.by_layer.weights:
            return
        present = torch.tensor([weight.grown for weight in self.by_layer.weights], dtype=torch.int32)
        dist.all_reduce(present, group=self._session.group("rdp"))
        had = [weight for weight, count in zip(self.by_layer.weights, present.tolist(), strict=True) if count]
        if self._column is not None:
            self._average_over_rows(had)
        self.by_layer.end()
        for weight in self.by_layer.weights:
            parameter = weight.parameter
            if parameter.grad is not None:
                raise UsageError(
                    f"{weight.name} has a gradient after the backward passes of all microbatches, which replicas have "
                    'not averaged: write "sharded_parameters_gathered": "step"'
                )
            assert weight.share is not None
            resize(parameter, weight.share)
            mark(parameter, weight.how, self._sharding_group)
            kept = weight.kept
            if weight in had and weight.sum is not None:
                kept = weight.sum if kept is None else kept.add_(weight.sum)
            parameter.grad = kept
            weight.share = weight.kept = weight.sum = None

    def _average_over_rows(self, weights: Sequence[SharedWeight]) -> None:
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

    def gather(self, layer: Layer[SharedWeight]) -> list[tuple[Tensor]]:
        """The wholes of the layer's weights; collective."""
        self._turns.agree(f"gathers the parameters of {layer.name}")
        shares = [weight.share for weight in layer.weights if weight.share is not None]
        full_tensors = self._sharding_group.all_gather(shares, [weight.how for weight in layer.weights])
        return [(each,) for each in full_tensors]

    def give_back(self, layer: Layer[SharedWeight]) -> None:
        """The shares are still there."""

    @torch.no_grad()
    def take_gradients(self, layer: Layer[SharedWeight]) -> None:
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
