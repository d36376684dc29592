"""``tsm.init``, and ``tsm.state``: what a process knows of its job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from weft.compat.refused import refuse_unknown
from weft.compat.torch_sagemaker import settings as sagemaker_settings
from weft.errors import UsageError
from weft.untrusted import MOST_RANKS, whole


class Ranker:
    """Groups of ranks that hold the same shares of the parameters."""

    def __init__(self, ranks: int, shares: int) -> None:
        self._ranks = ranks
        self._shares = shares

    def get_rep_rank(self, rank: int | None = None) -> int:
        """The number of the replica of which this rank, or the one given, has a share."""
        return (dist.get_rank() if rank is None else rank) // self._shares

    def get_rep_groups(self) -> list[list[int]]:
        """The ranks that have the same share, for each of the shares."""
        return [list(range(share, self._ranks, self._shares)) for share in range(self._shares)]


class RngStateTracker:
    """Where nothing is cut into parts, all random numbers come from PyTorch's own generator."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        """A context that changes nothing."""
        yield


class State:
    """The state of a job after :func:`init`: its settings as attributes, ranks and groups."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._known:
            raise UsageError(
                f"torch.sagemaker.state.{name} is known after torch.sagemaker.init(): call that before"
            )
        if name not in self._known:
            refuse_unknown("torch.sagemaker.state", name)
        return self._known[name]

    def enter(self, known: dict[str, Any]) -> None:
        self._known = known

    def get_rng_state_tracker(self) -> RngStateTracker:
        """The tracker whose ``fork()`` runs what draws random numbers for parts of layers."""
        return RngStateTracker()


state = State()


def init(config: Mapping[str, Any] | None = None) -> None:
    """Make this process one of its job's: :data:`state` is known afterwards, and FSDP shards as ``config`` says.

    Args:
        config: Settings; without them, those in ``SM_HP_MP_PARAMETERS``.
    """
    from weft.compat.torch_sagemaker import sharding

    ranks = (
        dist.get_world_size()
        if dist.is_initialized()
        else whole(os.environ.get("WORLD_SIZE", ""), MOST_RANKS) or 1
    )
    settings = sagemaker_settings.read(config, ranks)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    shares = settings.hybrid_shard_degree or ranks
    rows = [list(range(first, first + shares)) for first in range(0, ranks, shares)]
    ranker = Ranker(ranks, shares)
    state.enter(
        {
            **vars(settings),
            **dict.fromkeys(("tp_rank", "cp_rank", "ep_rank"), 0),
            **dict.fromkeys(("tp_size", "cp_size", "ep_size"), 1),
            "ranker": ranker,
            "world_process_group": dist.group.WORLD,
            "tp_process_group": _own([[each] for each in range(ranks)], rank),
        }
    )
    hybrid = 1 < shares < ranks
    sharding.install(
        settings.hybrid_shard_degree,
        (_own(rows, rank), _own(ranker.get_rep_groups(), rank)) if hybrid else None,
    )


def _own(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    """The group of this rank, of groups that all ranks make together."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
