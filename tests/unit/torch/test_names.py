"""Names that scripts import: one list of them, and none of an earlier version is gone."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import weft.torch as weft

NAMES = (Path(__file__).parents[2] / "data" / "version-1" / "names.txt").read_text().split()
"""What version 1 offered in `weft.torch`."""
LATER = (
    "checkpoints", "notebook_run", "on_finding", "set_activation_checkpointing", "set_tensor_parallelism",
    "stream_weights", "tensor_parallelism",
)  # fmt: skip
"""What has come since."""
PRINTED = {
    "weft.partition.auto": ("simulation",),
    "weft.partition.explain": ("explain",),
    "weft.partition.stages": ("Placer", "choices", "refined"),
    "weft.torch.graph_file": ("Example", "traced_graph"),
    "weft.torch.data_parallel": ("DistributedDataParallel", "hook"),
    "weft.schedule": ("ListCost", "from_csv", "greedy", "make", "to_csv"),
    "weft.schedule.legal": ("check",),
    "weft.simulate": ("Links", "StageCost", "as_run", "simulate"),
    "weft.report.page": ("Entry", "page"),
    "weft.report.picture": ("timeline_svg",),
    "weft.reduce.choice": ("choose",),
    "weft.reduce.compression": ("make",),
    "weft.profiler.reading": ("read_recording",),
}
"""Modules that the documentation of version 1 imports from, and what."""


def test_names_of_version_1_are_there():
    assert set(NAMES) <= set(weft.__all__) and len(NAMES) == 75


def test_the_list_has_no_rooms_and_no_name_twice():
    modules = [name for name in weft.__all__ if isinstance(getattr(weft, name), ModuleType)]
    assert modules == ["amp"] and len(set(weft.__all__)) == len(weft.__all__)
    assert set(weft.__all__) == {*NAMES, *LATER}, "a new name belongs into a list of its own version"


@pytest.mark.parametrize("module", PRINTED)
def test_what_the_documentation_printed_can_be_imported(module: str):
    there = vars(importlib.import_module(module))
    assert [name for name in PRINTED[module] if name not in there] == []
