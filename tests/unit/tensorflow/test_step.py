"""Arguments of a step of TensorFlow."""

from __future__ import annotations

import pytest

from weft.errors import UsageError


def test_a_cut_by_tokens_is_refused():
    import weft.tensorflow as weft

    with pytest.raises(UsageError, match="tokens= cuts steps of PyTorch: leave it out"):
        weft.step(tokens="mask")
