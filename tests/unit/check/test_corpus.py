"""Nothing is wrong in the scripts that run in the tests: examples, whole scripts, the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.check.scripts import found
from tests.unit.test_docs import PAGES, ROOT, blocks
from weft.check import Grade

FILES = sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "tests" / "scripts").rglob("*.py")])
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES} | {
    block.where: block.text for page in PAGES for block in blocks(Path(page), "python")
}


def test_the_corpus_is_there():
    assert len(FILES) > 20
    assert len(TEXTS) > 80


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_wrong(name):
    assert [each for each in found(TEXTS[name]) if each.grade is Grade.WRONG] == []
