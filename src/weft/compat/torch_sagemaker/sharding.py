"""PyTorch's ``FullyShardedDataParallel``, with what the second version adds to its constructor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from weft.errors import ConfigError

OVER_ALL = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
"""Strategies without copies; those that are neither these nor ``NO_SHARD`` have copies."""

_degree = 0
_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
_installed = _inside = False


def install(degree: int, groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None) -> None:
    """Let modules that are wrapped from now on be sharded over so many ranks; 0: as the script says.

    Args:
        degree: ``hybrid_shard_degree``.
        groups: The ranks that have the shares of this rank's copy, and those that have the same share, if there are
            several of both.
    """
    global _degree, _groups, _installed
    _degree, _groups = degree, groups
    if _installed:
        return
    _installed = True
    made = FullyShardedDataParallel.__init__

    @functools.wraps(made)
    def init(
        self: Any,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        *args: Any,
        post_param_init_fn: Callable[[nn.Module], None] | None = None,
        **kwargs: Any,
    ) -> None:
        global _inside
        if _inside:  # a layer, which gets what was chosen for the model
            made(self, module, process_group, sharding_strategy, *args, **kwargs)
            return
        if _degree:
            if process_group is not None or kwargs.get("device_mesh") is not None:
                raise ConfigError(
                    f"hybrid_shard_degree is {_degree} and FSDP gets process_group or device_mesh: both say which "
                    "ranks share the parameters, so leave one of them out"
                )
            process_group, sharding_strategy = _groups, _chosen(sharding_strategy)
        _inside = True
        try:
            made(self, module, process_group, sharding_strategy, *args, **kwargs)
        finally:
            _inside = False
        if post_param_init_fn is not None:
            post_param_init_fn(self)

    setattr(FullyShardedDataParallel, "__init__", init)  # noqa: B010


def _chosen(wanted: ShardingStrategy | None) -> ShardingStrategy:
    """The strategy that shards over as many ranks as the setting says: the script's own, if it does."""
    if _degree == 1:
        return ShardingStrategy.NO_SHARD
    if wanted is ShardingStrategy.NO_SHARD:
        raise ConfigError(
            f"hybrid_shard_degree is {_degree} and FSDP gets sharding_strategy=NO_SHARD: set hybrid_shard_degree to 1, "
            "or leave sharding_strategy out"
        )
    if _groups is None:
        return wanted if wanted in OVER_ALL else ShardingStrategy.FULL_SHARD
    return ShardingStrategy.HYBRID_SHARD if wanted is None or wanted in OVER_ALL else wanted
