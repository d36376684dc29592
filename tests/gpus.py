"""Tests run on the CPU, also on a machine with GPUs: only `tests/gpu` shows them to its jobs."""

from __future__ import annotations

import os

VISIBLE = "CUDA_VISIBLE_DEVICES"
KEPT = "WEFT_TEST_GPUS"
"""The variable with the GPUs that there are, for `VISIBLE`; empty if there are none."""


def hide() -> None:
    """Hide all GPUs from this process and those that it starts."""
    if KEPT not in os.environ:
        import torch

        found = ",".join(map(str, range(torch.cuda.device_count())))
        os.environ[KEPT] = os.environ.get(VISIBLE, found) if found else ""
    os.environ[VISIBLE] = ""
