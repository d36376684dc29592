"""Updates of weights that are cut over ranks, by optimizers that look at whole ones: norms, rows and columns, roots.

Each weight has an owner among the ranks that hold its parts. Its states are there only, and whole.

    agree      which weights have a gradient, on any of the ranks that hold them
    gather     weights and gradients go to their owners, in rounds: of each owner so many, by one all-to-all
    update     each owner runs the optimizer's own step on its weights; those of the next rounds are on the way
    scatter    each rank gets its parts of what the owners have made

A weight stays the same object, which is whole for the time of the update. One that was cut twice, over ranks that split
tensors and then over replicas, goes the way back: first to the replica of its owner, then to the owner. See
``docs/design/sharding.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from weft.torch.offload.partial_steps import gradients_apart, in_calls
from weft.torch.replicas.optimizer_trials import updates_parts_alike, updates_weights_alone
from weft.torch.tensor_parallel import Cut, cuts_of
from weft.torch.tensor_parallel.cuts import Holders, cut_by, joined

BUCKET_BYTES = 25 << 20
"""About as many bytes of a rank's parts travel in one message; more if those of one round have more."""


def can_update_whole(optimizer: Optimizer) -> bool:
    """True if the optimizer has to see whole weights, but not several at once."""
    return not updates_parts_alike(optimizer) and updates_weights_alone(optimizer)


@dataclass
class _Weight:
    """A weight of which several ranks have parts.

    Attributes:
        number: Its number in the optimizer.
        tensor: What this rank has of it.
        size: The number of elements of the whole.
        cuts: Its cuts, and the ranks that hold the parts; the cut of the whole first. None where this rank has all of
            it, and others nothing, as of an expert.
        apart: Weights with another value here are balanced for themselves.
        owner: Of each of these groups of ranks, the place of the weight's owner in it.
    """

    number: int
    tensor: Tensor
    size: int
    cuts: tuple[tuple[Cut, Holders], ...]
    apart: tuple[Any, ...]
    owner: list[int] = field(default_factory=list)

    def passes(self, level: int = 0) -> bool:
        """True if this rank has the part of the first ``level`` cuts on the weight's way; all of it with 0."""
        later = zip(self.cuts[level:], self.owner[level:], strict=True)
        return all(holders.rank == place for (_, holders), place in later)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The same for weights that travel in one message."""
        groups = tuple(id(holders) for _, holders in self.cuts)
        return groups, self.tensor.dtype, _gradient_dtype(self.tensor), self.tensor.device


class WholeUpdates:
    """The updates of an optimizer whose weights are cut. The ranks that hold a weight decide alike who owns it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights: dict[int, _Weight] = {}
        self._elsewhere: dict[int, Tensor] = {}
        """Weights of which another rank has all."""
        self._loads: dict[Any, list[int]] = {}

    def __contains__(self, number: object) -> bool:
        """True if the parameter of that number is cut, so that one rank updates it and keeps its states, whole."""
        return number in self._weights or number in self._elsewhere

    def has(self, number: int) -> bool:
        """True unless another rank updates the parameter of that number."""
        weight = self._weights.get(number)
        return number not in self._elsewhere if weight is None else weight.passes()

    def extend(self, weights: Mapping[int, tuple[Tensor, Tensor]], apart: Mapping[int, Any]) -> bool:
        """Give each weight that was cut since the last call to an owner: the largest first, each to the rank with the
        least so far. True if there are such weights.

        ``weights``: those of this rank by their numbers, each with what the optimizer steps on; ``apart``: of each,
        among which ones it is balanced.
        """
        new = False
        for number, (weight, tensor) in weights.items():
            cuts = cuts_of(weight)
            if any(how.holder not in (None, holders.rank) for how, holders in cuts):
                new |= number not in self._elsewhere
                self._elsewhere[number] = tensor
                continue
            parts = tuple((how, holders) for how, holders in cuts if how.holder is None)
            known = self._weights.get(number)
            if cuts and (known is None or len(known.cuts) < len(parts)):
                owner = [] if known is None else known.owner
                size = math.prod(cuts[0][0].shape)
                # frozen ones apart, so that nothing has to move when they are trained later
                among = apart.get(number), tensor.requires_grad
                self._weights[number] = _Weight(number, tensor, size, parts, among, owner)
                new = True
            elif known is not None:
                known.tensor = tensor
        if new:
            self._choose_owners()
        return new

    def _choose_owners(self) -> None:
        weights = sorted(self._weights.values(), key=lambda weight: (-weight.size, weight.number))
        for level in range(max((len(weight.cuts) for weight in weights), default=0)):
            for weight in weights:
                if len(weight.owner) == level < len(weight.cuts):
                    axes = tuple(holders.axis for _, holders in weight.cuts[: level + 1])
                    loads = self._loads.setdefault(
                        (axes, *weight.owner, *weight.apart), [0] * weight.cuts[level][1].size
                    )
                    place = loads.index(min(loads))
                    loads[place] += weight.size
                    weight.owner.append(place)

    @torch.no_grad()
    def step(self, update: Callable[[], Any], setting: str) -> Any:
        """One step of the optimizer, collective over the ranks that hold its weights.

        ``update``: updates the parameters that have a gradient; what its first call gives is returned. ``setting``: by
        which the weights are cut.
        """
        everything = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        cut = {id(weight.tensor) for weight in self._weights.values() if weight.cuts}
        cut |= {*map(id, self._elsewhere.values())}
        rest = [parameter for parameter in everything if id(parameter) not in cut]
        with in_calls(self._optimizer, setting, update) as call, gradients_apart(everything) as grads:
            buckets, results = self._buckets(grads), []
            coming = [_Bucket(bucket, grads) for bucket in buckets[:1]]
            if any(grads[id(parameter)] is not None for parameter in rest) or not buckets:
                for parameter in rest:
                    parameter.grad = grads[id(parameter)]
                results.append(call())
                for parameter in rest:
                    parameter.grad = None
            leaving: Callable[[], None] | None = None
            for number, bucket in enumerate(buckets):
                coming += [_Bucket(bucket, grads) for bucket in buckets[number + 1 : number + 2]]
                with coming.pop(0).whole() as owned:
                    if owned:
                        results.append(call())
                    updated = [weight.tensor.data for weight in owned]
                if leaving is not None:
                    leaving()
                leaving = _scattered(bucket, updated)
            if leaving is not None:
                leaving()
            return results[0] if results else call()

    def _buckets(self, grads: Mapping[int, Tensor | None]) -> list[list[_Weight]]:
        """The weights with gradients, those that travel together in one list; the same on all ranks that hold them."""
        kinds: dict[Any, list[_Weight]] = {}
        for _, weight in sorted(self._weights.items()):
            if weight.cuts:
                kinds.setdefault(weight.kind, []).append(weight)
        found: list[list[_Weight]] = []
        for weights in kinds.values():
            flags = torch.tensor(
                [grads[id(weight.tensor)] is not None for weight in weights], dtype=torch.uint8,
                device=weights[0].tensor.device,
            )  # fmt: skip
            for _, holders in weights[0].cuts:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=holders.group)
            found += _rounds([weight for weight, has in zip(weights, flags.tolist(), strict=True) if has])
        return found


def _rounds(weights: Sequence[_Weight]) -> list[list[_Weight]]:
    """The weights in buckets, in each of which all owners have about as many elements."""
    by_owner: dict[tuple[int, ...], list[_Weight]] = {}
    for weight in sorted(weights, key=lambda weight: (-weight.size, weight.number)):
        by_owner.setdefault((*weight.owner,), []).append(weight)
    buckets: list[list[_Weight]] = []
    size_bytes = BUCKET_BYTES
    for turn in zip_longest(*(by_owner[owner] for owner in sorted(by_owner))):
        round_ = [weight for weight in turn if weight is not None]
        ranks = math.prod(holders.size for _, holders in round_[0].cuts)
        more_bytes = sum(weight.size * weight.tensor.element_size() for weight in round_) // ranks
        if size_bytes + more_bytes > BUCKET_BYTES:
            buckets.append([])
            size_bytes = 0
        buckets[-1] += round_
        size_bytes += more_bytes
    return buckets


class _Bucket:
    """Weights and gradients on their way to the owners, from the making of this on."""

    def __init__(self, weights: Sequence[_Weight], grads: Mapping[int, Tensor | None]) -> None:
        self._owned = [weight for weight in weights if weight.passes()]
        own = [grads[id(weight.tensor)] for weight in weights]
        self._gradients = _gathered(
            weights,
            [
                (torch.zeros_like(weight.tensor) if grad is None else grad).to(_gradient_dtype(weight.tensor))
                for weight, grad in zip(weights, own, strict=True)
            ],
        )
        self._values = _gathered(weights, [weight.tensor.detach() for weight in weights])

    @contextmanager
    def whole(self) -> Iterator[list[_Weight]]:
        """Inside, the weights that this rank owns are whole, with their gradients."""
        parts = [weight.tensor.data for weight in self._owned]
        gradients, values = self._gradients(), self._values()
        for weight, value, gradient in zip(self._owned, values, gradients, strict=True):
            weight.tensor.data, weight.tensor.grad = value, gradient
        del gradients, values
        try:
            yield self._owned
        finally:
            for weight, part in zip(self._owned, parts, strict=True):
                weight.tensor.grad = None
                weight.tensor.data = part


def _gradient_dtype(tensor: Tensor) -> torch.dtype:
    """The type of its gradient, which newer versions of PyTorch let scripts choose."""
    found: torch.dtype = getattr(tensor, "grad_dtype", None) or tensor.dtype
    return found


def _gathered(weights: Sequence[_Weight], parts: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Begins to bring parts of weights to the owners; what waits for it, and gives what this rank owns, whole."""
    last = len(weights[0].cuts) - 1
    arrive = _to_owners(weights, parts, last)

    def finish() -> list[Tensor]:
        found = arrive()
        for level in reversed(range(last)):
            found = _to_owners([weight for weight in weights if weight.passes(level + 1)], found, level)()
        return found

    return finish


def _to_owners(weights: Sequence[_Weight], parts: list[Tensor], level: int) -> Callable[[], list[Tensor]]:
    """The same for one cut, of weights whose parts this rank has."""
    holders = weights[0].cuts[level][1] if weights else None
    if holders is None:
        return list
    own = [weight for weight in weights if weight.owner[level] == holders.rank]
    arrive = _exchanged(
        holders,
        [
            [part for weight, part in zip(weights, parts, strict=True) if weight.owner[level] == place]
            for place in range(holders.size)
        ],
        [
            [weight.cuts[level][0].local_shape(place, holders.size) for weight in own]
            for place in range(holders.size)
        ],
        parts[0],
    )

    def finish() -> list[Tensor]:
        by_weight = zip(*arrive(), strict=True)
        return [joined(pieces, weight.cuts[level][0]) for weight, pieces in zip(own, by_weight, strict=True)]

    return finish


def _scattered(weights: Sequence[_Weight], updated: list[Tensor]) -> Callable[[], None]:
    """Begins to bring parts of what this rank owns, and has updated, to all ranks; what waits for it."""
    last = len(weights[0].cuts) - 1
    found = updated
    for level in range(last):
        found = _to_holders([weight for weight in weights if weight.passes(level + 1)], found, level)()
    arrive = _to_holders(weights, found, last)

    def finish() -> None:
        for weight, part in zip(weights, arrive(), strict=True):
            weight.tensor.copy_(part)

    return finish


def _to_holders(
    weights: Sequence[_Weight], full_tensors: list[Tensor], level: int
) -> Callable[[], list[Tensor]]:
    """The same for one cut, of weights of which this rank gets parts."""
    holders = weights[0].cuts[level][1] if weights else None
    if holders is None:
        return list
    size = holders.size
    own = [weight for weight in weights if weight.owner[level] == holders.rank]
    by_owner = [[weight for weight in weights if weight.owner[level] == place] for place in range(size)]
    arrive = _exchanged(
        holders,
        [
            [
                cut_by(whole, weight.cuts[level][0], place, size)
                for weight, whole in zip(own, full_tensors, strict=True)
            ]
            for place in range(size)
        ],
        [[weight.cuts[level][0].local_shape(holders.rank, size) for weight in each] for each in by_owner],
        weights[0].tensor,
    )

    def finish() -> list[Tensor]:
        parts = {
            weight.number: part
            for each, came in zip(by_owner, arrive(), strict=True)
            for weight, part in zip(each, came, strict=True)
        }
        return [parts[weight.number] for weight in weights]

    return finish


def _exchanged(
    holders: Holders,
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    like: Tensor,
) -> Callable[[], list[list[Tensor]]]:
    """Begins to send tensors to each rank; what waits for it, and gives the tensors that came from each.

    ``shapes``: of those that come; ``like``: of their dtype and device.
    """
    leaving = torch.cat([like.new_empty(0), *(part.reshape(-1) for each in sent for part in each)])
    sizes = [[math.prod(shape) for shape in each] for each in shapes]
    arriving = like.new_empty(sum(map(sum, sizes)))
    work: Any = dist.all_to_all_single(
        _bytes(arriving),
        _bytes(leaving),
        [sum(each) * like.element_size() for each in sizes],
        [sum(part.numel() for part in each) * like.element_size() for each in sent],
        group=holders.group,
        async_op=True,
    )

    def finish() -> list[list[Tensor]]:
        work.wait()
        assert leaving is not None  # until here it must not be freed
        came = arriving.split([sum(each) for each in sizes])
        return [
            [piece.view(*shape) for piece, shape in zip(flat.split(each), each_shape, strict=True)]
            for flat, each, each_shape in zip(came, sizes, shapes, strict=True)
        ]

    return finish


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
