"""Faults that are silent elsewhere; see `silent_errors.py` and docs/silent-errors-elsewhere.md."""

from __future__ import annotations

import re

import pytest

from tests.unit.test_docs import ROOT
from tests.unit.test_docs_places import defined

from .jobs import pass_checks
from .silent_errors import CHECKS

PAGE = ROOT / "docs" / "silent-errors-elsewhere.md"
TESTS = re.findall(r"`(tests/[\w/]+\.py)` `(\w+)`", PAGE.read_text(encoding="utf-8"))


def test_silent_errors() -> None:
    pass_checks("silent_errors.py", CHECKS, 2)


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_the_page_names_tests_that_are_there(path: str, name: str) -> None:
    assert name in defined((ROOT / path).read_text(encoding="utf-8"))


def test_each_row_of_the_page_names_a_test() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| ---", "| the fault"))]
    assert len(rows) == len(TESTS) > 15
