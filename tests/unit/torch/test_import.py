"""``import weft.torch`` loads of PyTorch and of other libraries what it needs by then, and no more."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
import weft.torch
print(json.dumps(sorted(set(sys.modules) - before)))
"""
LATER = (
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.onnx", "sympy",
    "triton", "numpy.random", "numpy.fft", "weft.torch.tensor_parallel.find", "weft.torch.context_parallel.find",
    "weft.analysis.analysis", "weft.rules", "weft.checkpoint", "weft.profiler", "weft.torch.split.partition_models",
)  # fmt: skip
MOST_OF_OTHERS = 40
"""Modules that neither ``import torch`` brings nor belong to weft: 30 with PyTorch 2.13, where they once were 890."""
MOST_OF_WEFT = 240
"""Modules of weft itself; the number may only fall."""


def test_what_few_jobs_need_is_loaded_by_those():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    loaded = json.loads(found.stdout)
    assert [name for name in LATER if name in loaded] == []
    weft = [name for name in loaded if name.split(".")[0] == "weft"]
    assert len(loaded) - len(weft) <= MOST_OF_OTHERS
    assert len(weft) <= MOST_OF_WEFT
