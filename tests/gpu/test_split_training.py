"""Training on a GPU: two processes that share it give one process's gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launching import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


def test_two_processes_share_a_gpu() -> None:
    done = run_ranks(2, Path(__file__).with_name("split_training.py"), timeout=110).check()
    assert "rank 0 loss" in done.stdout and "rank 1 loss" in done.stdout
