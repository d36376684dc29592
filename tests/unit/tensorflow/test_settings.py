"""Settings that only PyTorch's side has are refused by name; none is taken and forgotten."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from weft.config import Settings
from weft.errors import ConfigError
from weft.tensorflow.join import _check

ONLY_PYTORCH: dict[str, Any] = {
    "devices": "measured", "rebalance": True, "shard_optimizer_state": True, "sharded_data_parallel_degree": 2,
    "offload_activations": True, "offload_optimizer": True, "offload_weights": True,
    "chunked_loss": "on", "tensor_parallel_degree": 2,
    "context_parallel_degree": 2, "inputs": "first",
    "compile": True, "expert_parallel_degree": 2, "min_replicas": 1, "trainer_tokens": "mask",
}  # fmt: skip
ONLY_WITH_THOSE = {
    "sharded_parameters_gathered",
    "sequence_parallel",
    "experts",
    "context_parallel_attention",
}
"""They say something of a refused setting, or are refused without it."""
BOTH = {
    "partitions", "microbatches", "pipeline", "executor", "memory_limit", "schedule_file", "chunks", "optimize",
    "memory_weight", "contiguous", "auto_partition", "default_partition", "active_microbatches", "placement_strategy",
    "ddp", "all_reduce", "compression", "heartbeat_timeout", "wait_timeout", "deterministic", "checked", "verify",
    "verify_report", "log_dir", "tensorboard", "record", "record_steps",
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY_PYTORCH)
def test_what_only_pytorch_has_is_refused(name: str):
    settings = Settings(partitions=2, **{name: ONLY_PYTORCH[name]})
    with pytest.raises(ConfigError, match=f"weft.tensorflow has no {name}: leave it out, or use PyTorch"):
        _check(settings)


def test_what_both_have_is_taken():
    _check(Settings(partitions=2, microbatches=4, chunked_loss="off"))


def test_every_setting_is_one_or_the_other():
    """A new one is to be done in TensorFlow, or refused there."""
    assert {field.name for field in fields(Settings)} == {*ONLY_PYTORCH, *ONLY_WITH_THOSE, *BOTH}
