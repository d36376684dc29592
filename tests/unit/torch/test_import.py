"""`import weft.torch` loads of PyTorch what it needs by then."""

from __future__ import annotations

import subprocess
import sys

LATER = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.onnx")


def test_compilers_and_fsdp_are_loaded_where_somebody_uses_them():
    program = "import sys, weft.torch; print([name for name in sys.argv[1:] if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", program, *LATER], capture_output=True, text=True, check=True, timeout=100
    )
    assert found.stdout.strip() == "[]"
