"""Models of Keras on PyTorch are split by their layers; see `keras_layers`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.launching import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")


@pytest.mark.parametrize(
    "settings",
    [{"partitions": 2}, {"sharded_data_parallel_degree": 2}, {"tensor_parallel_degree": 2}],
    ids=lambda given: next(iter(given)),
)
def test_as_in_one_process(settings) -> None:
    script = Path(__file__).with_name("keras_layers.py")
    done = run_ranks(2, script, [json.dumps(settings)], timeout=300).check()
    assert done.stdout.count("passed\n") == 2 and "in one piece" not in done.stderr
    assert ("no weight of Sequential is sharded" in done.stderr) == ("tensor_parallel_degree" in settings)
