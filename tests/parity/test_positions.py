"""Steps whose layers see other positions than by attention: convolutions, recurrences, windows; see `positions.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long import some_of

from .jobs import Layout, pass_layouts
from .positions import CHECKS

MODELS = [name for name in CHECKS if name.startswith("a_model_trains")]
OWN = [name for name in CHECKS if name not in MODELS]
FEW = [
    f"a_model_trains[{family}, positions]" for family in ("Lfm2", "Mamba2", "Qwen3Next", "Rwkv", "Mistral")
]
LAYOUTS: list[Layout] = [
    (2, 1, {"context_parallel_degree": 2}, [*CHECKS]),
    (4, 1, {"context_parallel_degree": 4}, [*OWN, *FEW]),
    (4, 1, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, [*OWN, *FEW]),
    (4, 2, {"context_parallel_degree": 2}, FEW),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(3, LAYOUTS), ids=["some", "all"])
def test_steps(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("positions.py", layouts, tmp_path)
