"""Modules that compute on sharded sequences, decided with the first microbatch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace as replace_fields
from typing import Any

from torch import nn

from weft.errors import UsageError
from weft.torch.context_parallel import Sequences
from weft.torch.model import DistributedModel
from weft.torch.placed.plan import is_below
from weft.torch.session.session import Session
from weft.torch.split.first_microbatch import forward_only
from weft.torch.tensor_parallel import Splits
from weft.torch.tensors.mini_batch import MiniBatch
from weft.torch.trace.record import Trace

log = logging.getLogger("weft")


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

    with forward_only(session, [model], function, batch) as run:
        found = find(model.module, run, size, {} if splits is None else splits.apart())
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
    return _without(found, {**large, **leaking})


def _without(found: Sequences, reasons: Mapping[str, str]) -> Sequences:
    kept = {name: dim for name, dim in found.regions.items() if name not in reasons}
    return replace_fields(found, regions=kept, whole={**found.whole, **reasons})
