"""Faults that are silent elsewhere; see `silent_errors.py` and tests/README.md."""

from __future__ import annotations

import re

import pytest

from tests.unit.test_docs import ROOT
from tests.unit.test_docs_places import defined

from .jobs import pass_checks
from .silent_errors import CHECKS

PAGE = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Errors that others make in silence\n")[2].partition("\n## ")[0]
TESTS = re.findall(r"`(tests/[\w/]+\.py)` `(\w+)`", SECTION)


def test_silent_errors() -> None:
    pass_checks("silent_errors.py", CHECKS, 2)


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_the_page_names_tests_that_are_there(path: str, name: str) -> None:
    assert name in defined((ROOT / path).read_text(encoding="utf-8"))


def test_each_row_of_the_page_names_a_test() -> None:
    lines = SECTION.splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| ---", "| the fault"))]
    assert len(rows) == len(TESTS) > 15
