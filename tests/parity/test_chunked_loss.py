"""Losses of language models in chunks of rows; see `chunked_loss.py`."""

from __future__ import annotations

import pytest

from .chunked_loss import CHECKS
from .jobs import pass_checks


@pytest.mark.parametrize("partitions", [2, 1])
def test_losses_in_chunks(partitions: int) -> None:
    pass_checks("chunked_loss.py", [*CHECKS], 2, "--partitions", str(partitions))
