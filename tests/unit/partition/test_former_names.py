"""Modules that scripts may import by the names they once had."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "auto": "Found Option Place Placed VISIT Within as_weft_runs merit options recomputed search simulation",
    "explain": "explain",
    "stages": "Placer base_option choices held_by_stage refined simulated_s stages_in stages_of step_s",
}


@pytest.mark.parametrize("module", NAMES)
def test_what_docs_have_printed_can_be_imported(module: str) -> None:
    found = importlib.import_module(f"weft.partition.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []
