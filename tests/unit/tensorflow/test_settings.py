"""Settings that only PyTorch's side has are refused by name; none is taken and forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from weft.config import Settings
from weft.errors import ConfigError
from weft.tensorflow.join import _check


@pytest.mark.parametrize(
    "asked",
    [
        {"devices": "measured", "partitions": 2},
        {"shard_optimizer_state": True},
        {"sharded_data_parallel_degree": 2},
        {"offload_activations": True},
        {"offload_optimizer": True},
        {"chunked_loss": "on"},
        {"tensor_parallel_degree": 2},
        {"context_parallel_degree": 2},
        {"inputs": "first"},
    ],
)
def test_what_only_pytorch_has_is_refused(asked: dict[str, Any]):
    name = next(iter(asked))
    with pytest.raises(ConfigError, match=f"weft.tensorflow has no {name}: leave it out, or use PyTorch"):
        _check(Settings(**asked))


def test_what_both_have_is_taken():
    _check(Settings(partitions=2, microbatches=4, chunked_loss="off"))
