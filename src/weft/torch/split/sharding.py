"""The parts of a model that ranks can shard, decided with one microbatch.

with_cuts        the weights of units that tensor parallelism could shard: for plans, before there are ranks
find_sequences   the modules that compute on sharded sequences
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.errors import UsageError
from weft.graph.model import Unit
from weft.torch.context_parallel import Sequences
from weft.torch.model import DistributedModel
from weft.torch.placed.plan import is_below
from weft.torch.session.session import Session
from weft.torch.split.first_microbatch import by_forward_runs
from weft.torch.tensor_parallel import Splits
from weft.torch.tensor_parallel.splits import COLUMN
from weft.torch.tensors.mini_batch import MiniBatch
from weft.torch.tensors.pytree import tensors_in
from weft.torch.trace.record import Trace

log = logging.getLogger("weft")
RANKS = (2, 4, 8)
"""Over so many ranks the model is tried: more than a host's share no link quickly enough."""


def with_cuts(units: Sequence[Unit], model: nn.Module, run: Callable[[], Any]) -> tuple[Unit, ...]:
    """The units with what ranks could cut of each.

    Args:
        units: Named as modules of the model are.
        model: The model.
        run: Runs the model once on one microbatch, forward only, and leaves nothing behind.
    """
    found = list(_splits(model, run))
    if not found:
        return tuple(units)
    sizes = _sizes(model, run, found[0])
    return tuple(_with_cut(unit, model, found, sizes) for unit in units)


def _splits(model: nn.Module, run: Callable[[], Any]) -> Iterator[Splits]:
    """The parts that can be cut over each number of ranks, as far as there are some."""
    from weft.torch.tensor_parallel.find import find  # it loads DTensor

    for ranks in RANKS:
        try:
            splits = find(model, run, ranks)
        except UsageError as error:  # this PyTorch cannot try it
            log.info("what ranks could cut of the model is not known: %s", error)
            return
        if not splits.regions:
            return
        yield splits


def _sizes(model: nn.Module, run: Callable[[], Any], splits: Splits) -> dict[str, int]:
    """The bytes that ranks all-reduce or gather after each module that is not column-parallel, or is so alone."""
    sizes: dict[str, int] = {}
    alone = {region.name for region in splits.regions}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            first = next(iter(tensors_in(result)), None)
            if first is not None:
                sizes[name] = sizes.get(name, 0) + first.numel() * first.element_size()

        return hook

    with ExitStack() as stack, torch.no_grad():
        for name, linear in splits.linears().items():
            if linear.kind != COLUMN or name in alone:
                handle = model.get_submodule(name).register_forward_hook(note(name))
                stack.callback(handle.remove)
        run()
    return sizes


def _with_cut(unit: Unit, model: nn.Module, found: Sequence[Splits], sizes: dict[str, int]) -> Unit:
    def mine(splits: Splits) -> list[str]:
        return [name for name in splits.linears() if _is_in(name, unit.name)]

    first = found[0]
    around = next((region.name for region in first.regions if _is_in(unit.name, region.name)), None)
    cut = mine(first)
    experts = [*_experts(first)]
    mixture = next((name for name, expert in experts if _is_in(unit.name, expert)), None)
    if mixture is not None:  # each rank has as many of them as the others, more or less, and they add up once
        most = max(splits.size for splits in found if mixture in splits.linears())
        count = sum(name == mixture for name, _ in experts)
        sent = sizes.get(mixture, 0) // count
        return replace(unit, cut_share=1.0, cut_bytes=sent, cut_ranks=most, cut_group=mixture)
    ranks = max((splits.size for splits in found if mine(splits) == cut), default=1)
    if not cut and (around is None or unit.parameters):
        return unit
    own = {id(p): p.numel() for p in model.get_submodule(unit.name).parameters()}
    parts = {id(p): p.numel() for name in cut for p in model.get_submodule(name).parameters()}
    return replace(
        unit,
        cut_share=sum(parts.values()) / sum(own.values()) if cut else 1.0,
        cut_bytes=sum(sizes.get(name, 0) for name in cut),
        cut_ranks=ranks,
        cut_group=around if around != unit.name else None,
    )


def _experts(splits: Splits) -> Iterator[tuple[str, str]]:
    """The experts that ranks share out: each with the name of its mixture."""
    for name, linear in splits.linears().items():
        for held in linear.held:
            if held.rank is not None:
                yield name, f"{name}.{held.name}" if name else held.name


def _is_in(name: str, module: str) -> bool:
    """True if a module is another one, or inside of it."""
    return not module or name == module or name.startswith(f"{module}.")


def find_sequences(
    session: Session, model: DistributedModel, function: Callable[..., Any], batch: MiniBatch, traced: Trace,
    splits: Splits | None,
) -> Sequences | None:  # fmt: skip
    """The model's modules that compute on sharded sequences; None if none is to. On the rank that decides.

    ``splits``: how its weights are cut over other ranks.

    Raises:
        UsageError: None of them can, with the reasons.
    """
    size = session.settings.context_parallel_degree
    if size == 1:
        return None
    from weft.torch.context_parallel.find import find  # it loads DTensor

    apart = {} if splits is None else splits.apart()
    found = by_forward_runs(
        session, [model], function, batch, lambda run: find(model.module, run, size, apart)
    )
    if session.settings.partitions > 1:
        found = _sendable(found, traced, session.settings.partitions, model.module)
    if not found.regions:
        raise UsageError(
            f"context_parallel_degree is {size}, but no module of the model can compute on parts of sequences: write "
            f'"context_parallel_degree": 1. {found.text()}'
        )
    return found


def _sendable(found: Sequences, traced: Trace, partitions: int, root: nn.Module) -> Sequences:
    """Without modules that must be opened between partitions: see ``_sendable`` of ``partition_models``."""
    most = sum(p.numel() for p in root.parameters()) / partitions
    large = {n: "it holds too much of the model to stay on one partition as a whole" for n in found.regions
             if sum(p.numel() for p in root.get_submodule(n).parameters()) > most}  # fmt: skip
    leaking = {
        name: "stores tensors in an attribute or a closure, which other partitions would not see"
        for name in found.regions
        if any(each == name or is_below(each, name) for each in traced.leaking)
    }
    if leaking:
        log.warning(
            "%s stores tensors in an attribute or a closure, neither returned nor put into what it is given, "
            "which ranks of other partitions would not see. So it computes whole sequences: let it return them, or put "
            'them into a list, dict or object that it is given, or write "partitions": 1',
            ", ".join(sorted(leaking)[:3]),
        )  # fmt: skip
    reasons = {**large, **leaking}
    kept = {name: dim for name, dim in found.regions.items() if name not in reasons}
    return replace(found, regions=kept, whole={**found.whole, **reasons})
