"""Which of FSDP's strategies ``hybrid_shard_degree`` makes of the script's."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy

from weft.compat.torch_sagemaker import sharding
from weft.errors import ConfigError

FULL, GRAD, NO, HYBRID = (
    ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
)
(ZERO2,) = set(ShardingStrategy) - {FULL, GRAD, NO, HYBRID}


@pytest.mark.parametrize(
    ("degree", "copies", "made"),
    [
        (1, True, dict.fromkeys((None, FULL, GRAD, NO, HYBRID, ZERO2), NO)),
        (4, False, {None: FULL, FULL: FULL, GRAD: GRAD, HYBRID: FULL, ZERO2: FULL}),
        (2, True, {None: HYBRID, FULL: HYBRID, GRAD: HYBRID, HYBRID: HYBRID, ZERO2: ZERO2}),
    ],
)
def test_the_strategy_that_shards_over_so_many_ranks(degree, copies, made, monkeypatch):
    monkeypatch.setattr(sharding, "_degree", degree)
    monkeypatch.setattr(sharding, "_groups", (object(), object()) if copies and degree > 1 else None)
    assert {wanted: sharding._chosen(wanted) for wanted in made} == made
    if degree > 1:
        with pytest.raises(
            ConfigError, match=f"hybrid_shard_degree is {degree} and FSDP gets .*=NO_SHARD: set "
        ):
            sharding._chosen(NO)
