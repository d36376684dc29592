"""A mixture whose experts are modules, of which each of several replicas has some.

The mixture's own code runs twice on a replica's rows. First experts give zeros, and note what they are called with; all
else that this run leaves behind is taken back. Then the rows travel to their experts, and the results back. In the
second run each call gets its result.

    own code: router, experts note rows -- all-to-all --> experts of this rank -- all-to-all --> own code again: results
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.session.random_streams import TORCH, Streams
from weft.torch.tensor_parallel.cuts import mark_copies
from weft.torch.tensor_parallel.experts.expert_parallel import Alike, Anchored, cuts_of_mixture, readable
from weft.torch.tensor_parallel.experts.sharded_experts import having
from weft.torch.tensor_parallel.rules import as_full_tensor
from weft.torch.tensor_parallel.sharded_activations import plain
from weft.torch.tensor_parallel.splits import Held, Linear
from weft.torch.tensors.cut_weights import own
from weft.torch.tensors.pytree import map_tensors, tensors_in

from .exchange import Combine, Dispatch, ExpertGroup, Routes, anchor

REMEDY = 'write "expert_parallel_degree": 1, or weft.set_tensor_parallelism(module, False)'


_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
NO_KIND, SEVERAL = (0, 0, 0), (-1, 0, 0)


def _kind(rows: Sequence[Tensor]) -> tuple[int, int, int]:
    """The width of rows, the place of their type among `_DTYPES`, and 1 if they need a gradient."""
    kinds = {(each.shape[-1], each.dtype) for each in rows}
    if len(kinds) != 1:
        return SEVERAL if kinds else NO_KIND
    ((width, dtype),) = kinds
    return (
        width,
        _DTYPES.index(dtype),
        int(torch.is_grad_enabled() and any(each.requires_grad for each in rows)),
    )


class Call(NamedTuple):
    """A call of an expert: its number among the mixture's, and the rows."""

    expert: int
    given: Tensor


class MixtureRun:
    """The present run of a mixture's code.

    Attributes:
        noted: What experts were called with; None where no mixture runs.
        results: What they are to give, call by call; None in the first run.
    """

    def __init__(self) -> None:
        self.noted: list[Call] | None = None
        self.results: list[Tensor] | None = None

    @contextmanager
    def running(self, results: list[Tensor] | None = None) -> Iterator[list[Call]]:
        """Inside, the mixture's own code runs; the calls of its experts."""
        self.noted, self.results = [], results
        try:
            yield self.noted
        finally:
            self.noted = self.results = None


class SharedMixture:
    """Stands for the ``forward`` of a module around experts: rows of this replica go in, and their results come out.

    Attributes:
        touched: The experts for which gradients of some replica have come, since :meth:`take_touched` was asked.
    """

    def __init__(
        self, module: nn.Module, name: str, linear: Linear, group: ExpertGroup, streams: Streams
    ) -> None:
        self.module, self.name, self.linear, self.group, self.streams = module, name, linear, group, streams
        self.run = MixtureRun()
        self.cuts = cuts_of_mixture(module, linear)
        self.experts = [module.get_submodule(held.name) for held in linear.held]
        self.touched: set[int] = set()
        apart = {each for expert in self.experts for each in expert.modules()}
        self._beside = [each for each in module.modules() if each not in apart]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors((args, kwargs), lambda each: as_full_tensor(plain(each)))
        before = self.streams.capture(TORCH)
        with taken_back(self._beside), self.run.running() as calls:
            type(self.module).forward(self.module, *args, **kwargs)
        self.streams.restore(before)
        results, link = self._results(calls)
        with self.run.running(results) as again:
            result = type(self.module).forward(self.module, *args, **kwargs)
        same = len(calls) == len(again) and all(
            one.expert == other.expert and torch.equal(one.given, other.given)
            for one, other in zip(calls, again, strict=False)
        )
        if not same:
            raise UsageError(
                f"{self.name}, whose experts replicas share, gives them other rows where it runs a second time on the "
                f"same input: {REMEDY}"
            )
        if link is None or not link.requires_grad:
            return result
        return map_tensors(
            result, lambda each: Anchored.apply(each, link) if each.is_floating_point() else each
        )

    def _results(self, calls: Sequence[Call]) -> tuple[list[Tensor], Tensor | None]:
        """The results of these calls, by the experts of all ranks; collective over the ranks.

        And, where there are no calls here, but elsewhere, a tensor without rows that the mixture's result has to depend
        on, so that this rank takes part in the others' backward pass.
        """
        order = sorted(range(len(calls)), key=lambda number: calls[number].expert)
        rows = [calls[number].given.reshape(-1, calls[number].given.shape[-1]) for number in order]
        group, name, count = self.group, self.name, len(self.experts)
        counts = [0] * count
        for number, each in zip(order, rows, strict=True):
            counts[calls[number].expert] += len(each)
        group.agree(f"sends rows to the experts of {name}")
        gathered = group.all_gather_counts([*counts, *_kind(rows)])
        table, kinds = (
            [each[:count] for each in gathered],
            {tuple(each[count:]) for each in gathered} - {NO_KIND},
        )
        if len(kinds) > 1 or SEVERAL in kinds:
            raise UsageError(
                f"the experts of {name}, which replicas share, get rows of several kinds: {REMEDY}"
            )
        if not kinds:
            return [], None
        ((width, dtype, needs_grad),) = kinds
        like = rows[0] if rows else next(iter(weights_in(self.experts[0]).values()))
        given = torch.cat([like.new_zeros((0, width), dtype=_DTYPES[dtype]), *rows])
        if not calls:
            given.requires_grad_(bool(needs_grad))
        made = self._made(given, table)
        if not calls:
            return [], made
        pieces = dict(zip(order, made.split([len(each) for each in rows]), strict=True))
        return [
            pieces[number].view(*call.given.shape[:-1], made.shape[-1]) for number, call in enumerate(calls)
        ], None

    def _made(self, given: Tensor, table: Sequence[Sequence[int]]) -> Tensor:
        """The results of the experts of all ranks for this rank's rows, ``[rows, features]`` in the order of experts.

        ``table``: how many rows each rank has for each expert, ``[ranks, experts]``.
        """
        group, name = self.group, self.name
        holders = [held.rank for held in self.linear.held]
        mine = [number for number, rank in enumerate(holders) if rank == group.rank]
        counts = [[of_rank[n] for n in mine] for of_rank in table]
        sent = [
            sum(table[group.rank][n] for n, at in enumerate(holders) if at == rank)
            for rank in range(group.size)
        ]
        routes = Routes(torch.arange(len(given), device=given.device), sent, [*map(sum, counts)], len(given))
        (arrived,) = Dispatch.apply(name, routes, group, given)
        made = self._run_experts(arrived, counts, mine)
        group.agree(f"sends results of the experts of {name} back")
        used = {number for number in range(len(holders)) if any(of_rank[number] for of_rank in table)}
        weights = [each for expert in self.experts for each in weights_in(expert).values()]
        links = [*anchor(weights, made), *([] if len(arrived) else [arrived])]
        back: Tensor = Combine.apply(name, routes, group, lambda: self.touched.update(used), made, *links)
        return back

    def _run_experts(self, arrived: Tensor, counts: Sequence[Sequence[int]], mine: Sequence[int]) -> Tensor:
        """The results of this rank's experts for rows of all ranks. ``counts``: how many, by rank and expert."""
        pieces = [list(part.split([*each])) for part, each in zip(
            arrived.split([sum(each) for each in counts]), counts, strict=True
        )]  # fmt: skip
        made: list[list[Tensor]] = [[] for _ in counts]
        for place, number in enumerate(mine):
            lengths = [len(piece[place]) for piece in pieces]
            if not sum(lengths):
                width, dtype = self.linear.held[number].width, result_dtype(self.linear.held[number], arrived)
                result = arrived.new_zeros((0, width), dtype=dtype)
            else:
                result = self.run_expert(self.experts[number], torch.cat([piece[place] for piece in pieces]))
            for rank, part in enumerate(result.split(lengths)):
                made[rank].append(part)
        return torch.cat([part for of_rank in made for part in of_rank])

    def run_expert(self, expert: nn.Module, rows: Tensor) -> Tensor:
        """The result of an expert of this rank for rows."""
        weights = {name: Alike.apply(each, self.group.size) for name, each in weights_in(expert).items()}
        with having(expert, weights), readable(expert):
            return type(expert).forward(expert, rows)

    def members(self) -> dict[nn.Module, SharedExpert]:
        """The functions that replace the ``forward`` of the experts."""
        return {
            expert: SharedExpert(number, held, self.run)
            for number, (expert, held) in enumerate(zip(self.experts, self.linear.held, strict=True))
        }

    def take_touched(self) -> set[str]:
        """The parameters of experts for which gradients of some replica have come since this was asked."""
        found, self.touched = self.touched, set()
        return {
            f"{self.linear.held[number].name}.{name}"
            for number in found
            for name in weights_in(self.experts[number])
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMixture:
        module = memo[id(self.module)]
        copied = memo[id(self)] = SharedMixture(module, self.name, self.linear, self.group, self.streams)
        mark_copies(self.module, self.cuts, self.group, memo)
        return copied


class SharedExpert:
    """Stands for the ``forward`` of an expert, in the code of its mixture."""

    def __init__(self, number: int, held: Held, run: MixtureRun) -> None:
        self.number, self.held, self.run = number, held, run

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        run, given = self.run, tensors_in((args, kwargs))
        if run.noted is None:
            raise UsageError(
                f"{self.held.name}, an expert that one of several replicas has, is called by other code than that of "
                f"the module whose experts they share: call that module, or {REMEDY}"
            )
        if len(given) != 1 or len(args) + len(kwargs) != 1:
            raise UsageError(
                f"{self.held.name}, an expert that one of several replicas has, is called with more than one tensor of "
                f"rows: {REMEDY}"
            )
        run.noted.append(Call(self.number, given[0]))
        if run.results is not None and len(run.noted) <= len(run.results):
            return run.results[len(run.noted) - 1]
        dtype = result_dtype(self.held, given[0])
        return given[0].new_zeros((*given[0].shape[:-1], self.held.width), dtype=dtype)


@contextmanager
def standing(members: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Inside, these functions stand for the modules' ``forward``."""
    for module, stands in members.items():
        module.__dict__["forward"] = stands
    try:
        yield
    finally:
        for module in members:
            del module.__dict__["forward"]


def result_dtype(held: Held, given: Tensor) -> torch.dtype:
    """The type of an expert's result for such rows."""
    kind = given.device.type
    return torch.get_autocast_dtype(kind) if held.rounded and torch.is_autocast_enabled(kind) else given.dtype


def weights_in(expert: nn.Module) -> dict[str, Tensor]:
    """The parameters of an expert by name, also inside a unit."""
    found = {}
    for name, _ in expert.named_parameters():
        owner, _, last = name.rpartition(".")
        found[name] = own(expert.get_submodule(owner), last)
    return found


@contextmanager
def taken_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, modules' attributes and buffers may be written: afterwards they are what they were.

    Lists and dicts among the attributes have their former items again.
    """
    attributes = [(vars(each), dict(vars(each))) for each in modules]
    items = [
        (value, value.copy())
        for _, before in attributes
        for value in before.values()
        if type(value) in (list, dict)
    ]
    buffers = [(buffer, buffer.clone()) for each in modules for buffer in each.buffers(recurse=False)]
    try:
        yield
    finally:
        for present, before in attributes:
            if present.keys() != before.keys() or any(present[name] is not before[name] for name in before):
                present.clear()
                present.update(before)
        for value, former in items:
            if isinstance(value, list):
                value[:] = former
            else:
                value.clear()
                value.update(former)
        with torch.no_grad():
            for buffer, former in buffers:
                if not torch.equal(buffer, former):
                    buffer.copy_(former)
