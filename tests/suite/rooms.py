"""The tests of a room: of one folder of the source, or of one file that stands beside the folders."""

from __future__ import annotations

import functools
from pathlib import Path

from tests.suite.imports import ROOT

BESIDE = ("", "torch", "tensorflow")
"""Folders whose files are rooms, too."""
NO_ROOMS = ("static", "path")
"""Files that a browser reads; names on the path of scripts, which `compat` tests."""
BEHAVIOUR = "tests/parity/test_behaviour.py"
KERAS = "tests/parity/tensorflow/test_checks.py"

MORE: dict[str, tuple[str, ...]] = {
    "cli/live": ("tests/unit/cli/test_top.py", "tests/unit/cli/test_fresh_page.py"),
    "compat/dataparallel": ("tests/unit/compat/test_names.py", "tests/unit/compat/test_public_names.py"),
    "compat/modelparallel": ("tests/parity/test_smdistributed.py", "tests/unit/compat"),
    "compat/tensorflow": ("tests/unit/compat/test_tensorflow_names.py",),
    "integrations": ("tests/integrations/test_accelerate.py",),
    "launch": ("tests/fault/test_launched.py",),
    "launch/remote": ("tests/fault/test_folders.py",),
    "launch/running": ("tests/fault/test_launchers.py",),
    "reduce": ("tests/parity/test_reductions.py",),
    "reduce/compression": ("tests/parity/test_reductions.py", "tests/unit/reduce"),
    "report/run": ("tests/browser/test_run_page.py",),
    "runtime": ("tests/parity/test_schedules.py",),
    "schedule/generators": ("tests/unit/schedule", "tests/golden"),
    "tensorflow/execution": (KERAS,),
    "tensorflow/optimizers": (KERAS, "tests/unit/tensorflow"),
    "tensorflow/replicas": ("tests/parity/tensorflow/test_replicas.py",),
    "tensorflow/split": (KERAS,),
    "tensorflow/step": (KERAS, "tests/unit/tensorflow"),
    "tensorflow/trace": (KERAS,),
    "tensorflow/verify": ("tests/parity/tensorflow/test_keras.py",),
    "torch/agreement": ("tests/parity/test_between_steps.py",),
    "torch/amp": (
        "tests/parity/test_between_steps.py",
        "tests/parity/test_shares.py",
        "tests/unit/torch/test_optimizer.py",
    ),
    "torch/backward": ("tests/parity/test_schedules.py",),
    "torch/calls": (BEHAVIOUR,),
    "torch/checkpoint": ("tests/parity/test_checkpoints.py",),
    "torch/clip": (
        "tests/parity/test_between_steps.py",
        "tests/unit/torch/test_two_ranks.py",
        "tests/parity/test_shared_parts.py",
    ),
    "torch/context_parallel": ("tests/parity/test_sequences.py",),
    "torch/data_parallel": ("tests/parity/test_data_parallel.py",),
    "torch/execution": (BEHAVIOUR,),
    "torch/keras_layers": ("tests/integrations/test_keras_layers.py",),
    "torch/model": (BEHAVIOUR, "tests/unit/torch/test_two_ranks.py"),
    "torch/optimizer": ("tests/parity/test_shares.py", "tests/unit/torch/test_two_ranks.py"),
    "torch/placed": (BEHAVIOUR,),
    "torch/replicas": ("tests/parity/test_replicas.py", "tests/unit/torch/test_two_ranks.py"),
    "torch/replicas/sharding": ("tests/parity/test_shared_parts.py", "tests/unit/torch/replicas"),
    "torch/session": ("tests/parity/test_together.py",),
    "torch/split": (BEHAVIOUR,),
    "torch/step": (BEHAVIOUR, "tests/unit/torch/test_two_ranks.py"),
    "torch/step_run": (BEHAVIOUR, "tests/unit/torch/test_two_ranks.py"),
    "torch/tensor_parallel": ("tests/parity/test_in_parts.py",),
    "torch/tensor_parallel/experts": ("tests/parity/test_experts.py", "tests/unit/torch/tensor_parallel"),
    "torch/tensor_parallel/sharded_activations": (
        "tests/parity/test_sharded_activations.py",
        "tests/unit/torch/tensor_parallel",
    ),
    "torch/trace": (BEHAVIOUR,),
    "torch/verify": ("tests/parity/test_verify.py",),
    "transport": ("tests/parity/test_together.py",),
    "watch": ("tests/fault/test_waits.py",),
}
"""Tests of a room beside those that mirror it: mostly several processes that must give one's numbers."""


@functools.cache
def rooms(root: Path = ROOT) -> dict[str, str]:
    """The rooms' names, each with the path of its folder or file."""
    source = root / "src" / "weft"
    folders = {path.parent for path in source.rglob("*.py")} - {source}
    found = {
        str(folder.relative_to(source)): folder
        for folder in folders
        if not set(NO_ROOMS) & set(folder.relative_to(source).parts)
    }
    for folder in BESIDE:
        for path in (source / folder).glob("[!_]*.py"):
            found[str(path.relative_to(source).with_suffix(""))] = path
    return {name: str(found[name].relative_to(root)) for name in sorted(found)}


def of_room(room: str, root: Path = ROOT) -> list[str]:
    """The paths of a room's tests: those that mirror it (or the room around it), its doctests, and what `MORE` has.

    Raises:
        KeyError: There is no such room.
    """
    here = rooms(root)[room]
    found = [path for path in (f"tests/unit/{room}", _test_file(room)) if (root / path).exists()]
    more = MORE.get(room, ())
    around = room
    while not found and not more and "/" in around:
        around = around.rpartition("/")[0]
        found = [path for path in (f"tests/unit/{around}",) if (root / path).exists()]
    return [here, *found, *(path for path in more if path not in found)]


def _test_file(room: str) -> str:
    folder, _, name = f"tests/unit/{room}".rpartition("/")
    return f"{folder}/test_{name}.py"
