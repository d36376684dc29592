"""Models of Keras on PyTorch are split by their layers; see `keras_layers`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.launching import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")


def test_as_in_one_process() -> None:
    done = run_ranks(2, Path(__file__).with_name("keras_layers.py"), timeout=300).check()
    assert done.stdout.count("passed\n") == 2 and "in one piece" not in done.stderr
