"""What weft sets on other people's objects is listed in one file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor, nn

import weft.torch
from weft.torch.tensors import marks

ROOT = Path(weft.torch.__file__).parents[1]
FILES = {
    path: path.read_text(encoding="utf-8")
    for room in ("torch", "compat", "integrations")
    for path in sorted((ROOT / room).rglob("*.py"))
    if path != Path(marks.__file__)
}
OF_MODULES = [name for name, value in vars(marks).items() if name.isupper() and isinstance(value, str)]
OF_STAND_INS = {"_weft_of", "_weft_device", "_weft_forgotten"}
ELSEWHERE = {"_weft_stands_for", "_weft_share", "_weft_buffers"}
"""Set on functions, by the stand-ins for CUDA; a key in an optimizer's state; on ``DistributedDataParallel``, by code
that runs before ``weft.torch`` may be imported."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_mark_is_listed(path):
    used = set(re.findall(r"\b_weft_\w+", FILES[path]))
    assert used <= {*marks.OF_TENSORS, *OF_STAND_INS, *ELSEWHERE}, (
        "marks of modules are written by their name in marks"
    )
    assert not re.findall(r"^Tensor\._weft_\w+ = ", FILES[path], re.M), "defaults are set in marks"


def test_every_mark_that_is_listed_is_used():
    text = "".join(FILES.values())
    by_constant = {marks.CUT: "CUT", marks.BLOCKS: "BLOCKS", marks.TAGS: "TAGS"}
    by_constant |= {marks.WINDOW: "WINDOW", marks.REACH: "REACH"}
    unused = [
        name
        for name in marks.OF_TENSORS
        if f".{name}" not in text and by_constant.get(name, name) not in text
    ]
    assert unused == []
    assert OF_MODULES and [name for name in OF_MODULES if not re.search(rf"\b{name}\b", text)] == []


def test_a_tensor_has_every_default():
    for tensor in (Tensor(), nn.Parameter()):
        assert {name: getattr(tensor, name) for name in marks.OF_TENSORS} == marks.OF_TENSORS
