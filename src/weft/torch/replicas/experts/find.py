"""Modules of experts that replicas can share, found by trying: with made-up weights, on rows of imagined replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.session.random_streams import Streams
from weft.torch.tensor_parallel.experts.equivalence import Bench, Call, Outcome, equal, in_mode
from weft.torch.tensor_parallel.experts.find import (
    WRITES,
    by_rank,
    count_experts,
    find_experts,
    tries_of,
    writes_buffers,
)
from weft.torch.tensor_parallel.experts.layout_trials import DROPOUTS, FAILS, under_autocast
from weft.torch.tensor_parallel.experts.mixtures import find_mixtures, is_in
from weft.torch.tensor_parallel.experts.sharded_experts import Own, having
from weft.torch.tensor_parallel.find import own_wish, owners_of
from weft.torch.tensor_parallel.splits import MIXTURE, Held, Linear, PartOf, Region, Splits, pattern
from weft.torch.tensors.pytree import tensors_in

from .dispatch import Rows, run_received
from .exchange import ExpertGroup, Routes, sum_by_row
from .mixture import SharedMixture, standing, taken_back

MIXED = "what it computes for a token depends on other tokens, or its code does not run twice alike"
NO_ROWS = "it is not known which of its tensors have a row for each token"


class OneReplica(ExpertGroup):
    """A replica that has all experts."""

    def __init__(self) -> None:
        super().__init__(None, 0, 1)

    def all_gather_counts(self, counts: Sequence[int]) -> list[list[int]]:
        return [[*counts]]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return rows


class _ByHalves(SharedMixture):
    """A mixture whose experts get the rows of two imagined replicas one after the other."""

    def run_expert(self, expert: nn.Module, rows: Tensor) -> Tensor:
        halves = [super(_ByHalves, self).run_expert(expert, rows[n::2]) for n in range(2) if len(rows) > n]
        order = torch.cat([torch.arange(len(rows))[n::2] for n in range(2)])
        return torch.cat(halves)[order.argsort()]


def find(model: nn.Module, run: Callable[[], Any], size: int, leaking: Collection[str] = ()) -> Splits:
    """The modules of experts that ``size`` replicas can share, and why others cannot be shared.

    One process does this by itself.

    Args:
        model: The model, whole.
        run: Runs the model once on one microbatch, and leaves nothing behind.
        size: How many replicas.
        leaking: Modules out of which tensors get by another way than their result.
    """
    owners, wish = owners_of(model), partial(own_wish, model, hooks=False)
    found, whole = find_mixtures(model, run, size, owners, wish, leaking, fitting_mixture)
    inside = [name for name, _ in model.named_modules() if any(is_in(name, each) for each in found)]
    stacked, others, _ = find_experts(
        model, run, size, owners, wish, inside=inside, leaking=leaking, fitting=fitting
    )
    found |= stacked
    regions = (Region(name, {name: found[name]}) for name, _ in model.named_modules() if name in found)
    return Splits(size, tuple(regions), {**whole, **others})


def table(splits: Splits) -> str:
    """A table: modules of layers that are alike in one line.

    >>> print(table(Splits(2, (), {"layers.0.experts": "it has 1 expert", "layers.1.experts": "it has 1 expert"})))
    experts over 2 replicas
      layers.*.experts    2  whole: it has 1 expert
    """
    rows: dict[tuple[str, str], int] = {}
    layouts = {name: "expert-parallel" for name in splits.linears()}
    layouts |= {name: f"whole: {why}" for name, why in splits.whole.items()}
    for name, how in layouts.items():
        rows[pattern(name), how] = rows.get((pattern(name), how), 0) + 1
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:{width}}  {count:3}  {how}" for (name, how), count in rows.items()]
    return "\n".join([f"experts over {splits.size} replicas", *lines])


def warning(splits: Splits, model: str) -> str:
    """The warning about a model whose experts every replica has whole all the same; empty where some are shared."""
    if splits.linears():
        return ""
    stays = [f"{name} stays whole ({why})" for name, why in splits.whole.items()]
    return (
        f"expert_parallel_degree is {splits.size}, but no experts of {model} are shared, and every replica has all of "
        f"them: {[*stays, 'it has no module with weights for several experts'][0]}"
    )


def fitting(module: nn.Module, args: Any, kwargs: Any, size: int, share: str) -> tuple[Linear | None, str]:
    """The cut of the module's weights for replicas that share its experts, and why there is none."""
    tries = tries_of(module, args, kwargs)
    if isinstance(tries, str):
        return None, tries
    experts = count_experts(module)
    rows = Rows(tensors_in((tries[0][0].args, tries[0][0].kwargs)), experts).places
    if not rows:
        return None, NO_ROWS
    linear = by_rank(module, tries, experts, size, _rows_agree)
    return (None, linear) if isinstance(linear, str) else (replace(linear, blocks=rows), "")


def fitting_mixture(
    module: nn.Module, experts: Sequence[Held], choices: int, args: Any, kwargs: Any, size: int
) -> Linear | str:
    """The layout of experts that are modules over replicas that share them; or why there is none."""
    bench = Bench(module, args, kwargs, choices)
    names = tuple(f"{each.name}." for each in experts)
    larger = bench.larger(lambda name: name.startswith(names))

    def alone(weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        with having(module, weights):
            return type(module).forward(module, *args, **kwargs)

    def shared(weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        held = tuple(replace(each, rank=0, draws=False) for each in experts)
        mixture = _ByHalves(module, "", Linear(MIXTURE, held=held), OneReplica(), Streams(bench.device))
        with standing(mixture.members()), having(module, weights):
            return mixture(*args, **kwargs)

    def run(on: Bench, call: Call) -> Outcome | None:
        with taken_back([*module.modules()]):
            return on.run(on.weights, call)

    inside = [each for one in experts for each in module.get_submodule(one.name).modules()]
    with in_mode(False, [each for each in inside if isinstance(each, DROPOUTS)]):  # ranks draw other numbers
        members = nn.ModuleList(module.get_submodule(each.name) for each in experts)
        if writes_buffers(members, lambda: run(bench, alone)):
            return WRITES
        for each in (bench, larger):
            expected, outcome = run(each, alone), run(each, shared)
            if expected is None:
                return FAILS
            if outcome is None or not _same(each, outcome, expected):
                return MIXED
        return Linear(MIXTURE, held=tuple(under_autocast(bench, experts, alone)))


def _same(bench: Bench, outcome: Outcome, expected: Outcome) -> bool:
    """True if two runs have the same results and gradients."""
    pairs = [*zip(outcome.results, expected.results, strict=False)]
    pairs += zip(outcome.gradients, expected.gradients, strict=True)
    pairs += [(outcome.weights[name], whole) for name, whole in expected.weights.items()]
    return (
        outcome.made == expected.made
        and equal(outcome.others, expected.others)
        and all(bench.near(actual, whole) for actual, whole in pairs)
    )


def _rows_agree(bench: Bench, expected: Outcome, parts: Sequence[PartOf], size: int) -> bool:
    """True if rows that are split over imagined replicas give the results and gradients of all rows together."""
    cut, experts = {part.name for part in parts}, count_experts(bench.module)

    def call(weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Tensor:
        rows = Rows(tensors_in((args, kwargs)), experts)
        owns = [Own.of(experts, rank, size) for rank in range(size)]
        pieces = [rows.split(replica, size) for replica in range(size)]
        wanted = [piece.wanted(owns) for piece in pieces]
        made = []
        for rank, some in enumerate(owns):
            counts = [int(each[rank].sum()) for each in wanted]
            received = [
                torch.cat([piece.tensors[n][each[rank]] for piece, each in zip(pieces, wanted, strict=True)])
                for n in range(len(rows.tensors))
            ]
            own = {
                name: value.narrow(0, some.first, some.count) if name in cut else value
                for name, value in weights.items()
            }
            result = run_received(bench.module, some, own, args, kwargs, rows, received, counts)
            made.append(result.split(counts))
        sums = []
        for replica, (piece, each) in enumerate(zip(pieces, wanted, strict=True)):
            indices = each.nonzero(as_tuple=True)[1]
            found = torch.cat([made[rank][replica] for rank in range(size)])
            sums.append(sum_by_row(found, Routes(indices, [], [], len(piece.tensors[0]))))
        order = torch.cat([rows.of_replica(replica, size) for replica in range(size)])
        return torch.cat(sums)[order.argsort()]

    outcome = bench.run(bench.weights, call)
    return outcome is not None and _same(bench, outcome, expected)
