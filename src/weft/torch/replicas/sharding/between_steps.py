"""Sharded parameters of a partition: whole in a step, and a share of them on each replica between steps.

    the step begins     each parameter is gathered from the replicas that share it
    the step            as ever, with all schedules; gradients are averaged as ever
    the step ends       of each parameter and its gradient this rank keeps its share

A parameter stays the same object, so optimizers, hooks and schedulers have the right one whenever they were made. It is
cut along its first dim that the number of ranks divides; one without such a dim stays whole. Between steps it has the
mark of a part (see :mod:`weft.torch.tensor_parallel.cuts`), by which norms, states and checkpoints find the rest.

All ranks of a sharding group gather in the order of the model's parameters, before the first microbatch. So nothing
depends on the order in which microbatches run. See ``docs/design/sharding.md``. What the settings want gathered for
each microbatch instead is left to ``by_unit``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.replicas.sharding.by_unit import Units
from weft.torch.replicas.sharding.collectives import ShardingGroup
from weft.torch.replicas.steps import backend_of, new_group
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Cut
from weft.torch.tensor_parallel.cuts import cut_by, joined, mark, unmark
from weft.torch.tensors.shards import resize

MESSAGE_BYTES = 25 << 20
"""About as many bytes of a rank's shares travel in one message."""


class SharedParameters:
    """The parameters of this rank's part of ``model``, which are whole at first; collective over the replicas.

    Attributes:
        units: Those that are gathered for each microbatch; None if none are.
        whole: Whether a step runs, or the first one begins.
    """

    def __init__(self, session: Session, model: Any) -> None:
        ranks, degree = session.peers("rdp"), session.settings.sharded_data_parallel_degree
        first, place = divmod(session.position("rdp"), degree)
        row = ranks[first * degree : (first + 1) * degree]
        self._sharding_group = ShardingGroup(new_group(session, row, backend_of(session)), place, degree)
        sparse = {id(p) for module in model.module.modules() for p in _sparse(module)}
        cuts = [
            (name, parameter, how)
            for name, parameter in model.local_named_parameters()
            if id(parameter) not in sparse
            and not (model.experts and model.experts.has(parameter))
            and (how := cut_for(parameter, degree)) is not None
        ]
        cut = {id(parameter) for _, parameter, _ in cuts}
        self._others = [parameter for parameter in model.local_parameters() if id(parameter) not in cut]
        self.units: Units | None = None
        if session.settings.sharded_parameters_gathered == "microbatch":
            self.units = Units(session, model, cuts, self._sharding_group)
        self._in_units = [each for each in cuts if self.has_in_units(each[1])]
        self._cuts = [each for each in cuts if not self.has_in_units(each[1])]
        self._kept: dict[int, Tensor | None] = {}
        self.whole = self._first = True

    def has_in_units(self, parameter: Tensor) -> bool:
        """True if the parameter is gathered for each microbatch, and its gradients are averaged in there, too."""
        return self.units is not None and self.units.has(parameter)

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the parameters, without gradients, which :meth:`share` adds to; collective over the group."""
        if self.whole:
            return
        for name, parameter, how in self._in_units:
            self._check(name, parameter, how)
        for cuts in self._messages():
            shares = [parameter.data for _, parameter, _ in cuts]
            own = torch.cat([share.reshape(-1) for share in shares])
            parts = self._sharding_group.gather(own, 0, [own.numel()] * self._sharding_group.size)
            sizes = [share.numel() for share in shares]
            pieces = zip(*(part.split(sizes) for part in parts), strict=True)
            for (_, parameter, how), share, each in zip(cuts, shares, pieces, strict=True):
                self._kept[id(parameter)] = parameter.grad
                parameter.grad = None
                resize(parameter, joined([piece.view(share.shape) for piece in each], how))
                unmark(parameter)
            del shares, own, parts, pieces
        if self.units is not None:
            self.units.begin()
        self.whole = True

    def _check(self, name: str, parameter: Tensor, how: Cut) -> None:
        """Refuse a parameter that is not this rank's share any more."""
        expected = how.local_shape(self._sharding_group.rank, self._sharding_group.size)
        if tuple(parameter.shape) != expected:
            raise UsageError(
                f"{name} has the shape {list(parameter.shape)} before a step, but this rank's share of it has "
                f"{list(expected)}: change parameters in place, or by load_state_dict()"
            )

    def _messages(self) -> Iterator[list[tuple[str, nn.Parameter, Cut]]]:
        """The parameters that travel together: of one dtype and device."""
        kinds: dict[Any, list[tuple[str, nn.Parameter, Cut]]] = {}
        for name, parameter, how in self._cuts:
            self._check(name, parameter, how)
            kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter, how))
        for same in kinds.values():
            message: list[tuple[str, nn.Parameter, Cut]] = []
            size_bytes = 0
            for each in same:
                if message and size_bytes + each[1].nbytes > MESSAGE_BYTES:
                    yield message
                    message, size_bytes = [], 0
                message.append(each)
                size_bytes += each[1].nbytes
            yield message

    @torch.no_grad()
    def share(self) -> None:
        """Keep this rank's shares of parameters, and of gradients, which all replicas have averaged."""
        if not self.whole:
            return
        place, size = self._sharding_group.rank, self._sharding_group.size
        if self.units is not None and not self._first:
            self.units.end()
        for name, parameter, how in [*self._cuts, *self._in_units] if self._first else self._cuts:
            grad, kept = parameter.grad, self._kept.pop(id(parameter), None)
            if grad is not None and grad.is_sparse:
                raise UsageError(
                    f"{name} has a sparse gradient, of which replicas cannot keep shares: give its module sparse=True "
                    'before the model is wrapped, or write "sharded_data_parallel_degree": 1'
                )
            parameter.grad = None
            resize(parameter, cut_by(parameter.data, how, place, size))
            mark(parameter, how, self._sharding_group)
            if grad is not None:
                part = cut_by(grad, how, place, size)
                kept = part if kept is None else kept.add_(part)
            parameter.grad = kept
            del grad
        for parameter in self._others:
            grad = parameter.grad
            if grad is not None and not grad.is_sparse and grad.untyped_storage().nbytes() > grad.nbytes:
                parameter.grad = grad.clone()  # a place in a bucket would keep all of the bucket
        self.whole = self._first = False


def cut_for(parameter: Tensor, sharding_group: int) -> Cut | None:
    """The cut of a parameter: along its first dim that the number of ranks divides. None: it stays whole.

    >>> cut_for(torch.zeros(3, 8), 2)
    Cut(dim=1, blocks=(8,), shape=(3, 8), holder=None)
    >>> cut_for(torch.zeros(3), 2)
    """
    if not parameter.is_contiguous() or not parameter.numel():
        return None
    for dim, length in enumerate(parameter.shape):
        if length % sharding_group == 0:
            return Cut(dim, (length,), tuple(parameter.shape))
    return None


def _sparse(module: nn.Module) -> list[Tensor]:
    """The weight of an embedding whose gradients are sparse: optimizers for these look at whole rows."""
    return [module.weight] if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse else []
