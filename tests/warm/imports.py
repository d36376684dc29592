"""Modules that the processes have imported from which jobs are forked."""

from __future__ import annotations

import importlib

BASE = "base"
FLAVOURS = {
    BASE: ["safetensors.torch", "torch._dynamo", "weft.cli.main", "weft.torch"],
    "transformers": ["transformers.modeling_utils"],
    "tensorflow": ["tensorflow", "keras", ".".join(["weft", "tensorflow"])],
}
"""Modules that every rank would import for itself; those of the others come on top.

One name is put together: `tests.suite` would take it for a use of weft's files for TensorFlow by all that start jobs.
"""


def preload(flavour: str = BASE) -> None:
    """Imports the modules of a flavour."""
    for name in FLAVOURS[flavour]:
        importlib.import_module(name)
