"""A module of experts whose code runs on rows from all replicas that share them, on this rank's experts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.tensor_parallel.cuts import Cut, mark_copies
from weft.torch.tensor_parallel.experts.expert_parallel import Alike
from weft.torch.tensor_parallel.experts.sharded_experts import Own, cuts_of_experts, run, run_own
from weft.torch.tensor_parallel.rules import as_full_tensor
from weft.torch.tensor_parallel.sharded_activations import plain
from weft.torch.tensor_parallel.splits import OF_EXPERTS, Linear
from weft.torch.tensors.cut_weights import check_call, own
from weft.torch.tensors.pytree import map_tensors, tensors_in

from .exchange import Combine, Dispatch, ExpertGroup, Routes, anchor

_WHOLE_NUMBERS = torch.int64, torch.int32


class Rows:
    """The tensors that a module of experts is called with which have a row for each token, and where rows go.

    There is one of whole numbers among them: the experts to which each row goes. Or one has a number for each expert
    along its last dimension: then each row goes to all. Or rows are in the order of experts, as many for each: the
    first dimension is that of experts, or a multiple of their number.

    Attributes:
        places: Which of the module's tensors they are; empty if that is unknown.
        tensors: They themselves.
        by_expert: Whether they are in the order of experts.
    """

    def __init__(self, given: Sequence[Tensor], experts: int) -> None:
        chosen = [each for each in given if each.dtype in _WHOLE_NUMBERS and each.ndim in (1, 2)]
        scores = [each for each in given if each.ndim == 2 and each.shape[-1] == experts]
        routing = chosen if len(chosen) == 1 else scores[:1] if not chosen else []
        self._choices = routing[0] if chosen and routing else None
        self.by_expert = not routing and not chosen
        self.places = tuple(
            n for n, each in enumerate(given)
            if each.ndim and (len(each) == len(routing[0]) if routing else self.by_expert and len(each) % experts == 0)
        )  # fmt: skip
        self.tensors = [given[n] for n in self.places]
        self.experts = experts
        if len({len(each) for each in self.tensors}) > 1:
            self.places, self.tensors = (), []

    def split(self, replica: int, size: int) -> Rows:
        """The rows of one of so many imagined replicas."""
        part = copy.copy(self)
        part.tensors = [each[self.of_replica(replica, size)] for each in self.tensors]
        if self._choices is not None:
            part._choices = self._choices[self.of_replica(replica, size)]
        return part

    def of_replica(self, replica: int, size: int) -> Tensor:
        """The indices of its rows: they are no neighbours."""
        total = len(self.tensors[0])
        if not self.by_expert:
            return torch.arange(replica, total, size)
        return torch.arange(total).view(self.experts, -1)[:, replica::size].flatten()

    def wanted(self, owns: Sequence[Own]) -> Tensor:
        """For each rank, and each row, whether one of the rank's experts gets the row: ``[ranks, rows]``."""
        total, device = len(self.tensors[0]), self.tensors[0].device
        if self._choices is not None:
            choices = self._choices.reshape(total, -1)
        elif self.by_expert:
            choices = (
                torch.arange(self.experts, device=device).repeat_interleave(total // self.experts).view(-1, 1)
            )
        else:
            return torch.ones(len(owns), total, dtype=torch.bool, device=device)
        return torch.stack(
            [((choices >= each.first) & (choices < each.first + each.count)).any(1) for each in owns]
        )


def run_received(
    module: nn.Module, some: Own, weights: Mapping[str, Any], args: Any, kwargs: Any, rows: Rows,
    received: Sequence[Tensor], counts: Sequence[int],
) -> Tensor:  # fmt: skip
    """The part of the module's result that a rank's experts give for the rows which it has received.

    ``rows``: the tensors among the arguments in whose places the ``received`` ones come. ``counts``: how many came from
    each rank. Where nothing has come, one row for each expert runs that counts nothing: gradients have to find their
    way.
    """
    total, order = len(received[0]), None
    if not total:
        more = some.count if rows.by_expert else 1
        received = [
            torch.cat([each, each.new_full((more, *each.shape[1:]), 0 if each.is_floating_point() else -1)])
            for each in received
        ]
    elif rows.by_expert:  # from all ranks, then expert by expert
        blocks = torch.arange(total, device=received[0].device).split([*counts])
        order = torch.cat([block.view(some.count, -1) for block in blocks], 1).flatten()
        received = [each[order] for each in received]
    places = dict(zip(map(id, rows.tensors), received, strict=True))
    args, kwargs = map_tensors((args, kwargs), lambda each: places.get(id(each), each))
    if rows.by_expert:
        result = run(module, weights, args, kwargs, some.numbers(module))
    else:
        result = run_own(module, some, weights, args, kwargs)
    if not isinstance(result, Tensor) or result.shape[:1] != received[0].shape[:1]:
        raise ValueError("a module of experts gives something else than a row for each row")
    result = result.narrow(0, 0, total)
    return result if order is None else result[order.argsort()]


def own_in(module: nn.Module, name: str) -> Any:
    """A parameter of the module, or of one inside of it, by its name; also inside a unit."""
    owner, _, last = name.rpartition(".")
    return own(module.get_submodule(owner), last)


class Dispatched:
    """Stands for the ``forward`` of a module of experts: rows of this replica go in, and their results come out."""

    def __init__(self, module: nn.Module, name: str, linear: Linear, group: ExpertGroup) -> None:
        self.module, self.name, self.linear, self.group = module, name, linear, group
        self.cuts: dict[str, Cut] = cuts_of_experts(module, linear)
        self.experts = next(sum(part.blocks) for part in linear.parts if part.dim == OF_EXPERTS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_call(self.name)
        args, kwargs = map_tensors((args, kwargs), lambda each: as_full_tensor(plain(each)))
        given = tensors_in((args, kwargs))
        rows = Rows(given, self.experts)
        if rows.places != self.linear.blocks:
            shapes = ", ".join(f"{each.dtype} {list(each.shape)}" for each in given)
            raise UsageError(
                f"{self.name}, whose experts replicas share, is called with other tensors than in the first "
                f"microbatch ({shapes}), so it is not known which of them have a row for each token: write "
                '"expert_parallel_degree": 1, or weft.set_tensor_parallelism(module, False)'
            )
        group, weights = self.group, self._weights()
        owns = [Own.of(self.experts, rank, group.size) for rank in range(group.size)]
        ranks, indices = rows.wanted(owns).nonzero(as_tuple=True)
        sent = torch.bincount(ranks, minlength=group.size).tolist()
        group.agree(f"sends rows to the experts of {self.name}")
        received_counts = [counts[group.rank] for counts in group.all_gather_counts(sent)]
        routes = Routes(indices, sent, received_counts, len(rows.tensors[0]))
        received = Dispatch.apply(self.name, routes, group, *rows.tensors)
        result = run_received(
            self.module, owns[group.rank], weights, args, kwargs, rows, received, routes.received
        )
        group.agree(f"sends results of the experts of {self.name} back")
        links = anchor(weights.values(), result)
        return Combine.apply(self.name, routes, group, None, result, *links)

    def _weights(self) -> dict[str, Any]:
        """The module's parameters: those of this rank's experts, and what all ranks have."""
        nested = any("." in name for name in self.cuts)
        names = [name for name, _ in self.module.named_parameters(recurse=nested)]
        found = {name: own_in(self.module, name) for name in names}
        # rows of all ranks' samples meet here: the sum of their gradients becomes the mean, as over replicas
        return {
            name: Alike.apply(value, self.group.size) if name in self.cuts else value
            for name, value in found.items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatched:
        copied = memo[id(self)] = object.__new__(Dispatched)
        copied.__dict__.update(self.__dict__, module=memo[id(self.module)])
        mark_copies(self.module, self.cuts, self.group, memo)
        return copied
