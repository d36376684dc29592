"""What the generators make is what is kept as text; `python -m tests.golden` writes it anew."""

from __future__ import annotations

import pytest

from tests.golden.texts import FOLDER, TEXTS


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str):
    kept = (FOLDER / name).read_text(encoding="utf-8")
    assert TEXTS[name]() == kept, "if the change is meant, run: python -m tests.golden"


def test_no_file_is_left_over():
    assert {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.txt")} == set(TEXTS)
