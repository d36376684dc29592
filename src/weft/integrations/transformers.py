"""Hugging Face's ``Trainer``, and classes made from it, train a model that is split over the ranks.

The Trainer has a mode for models that are split by somebody else, under the names of smdistributed. That mode is used.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from weft.compat.enable import enable as enable_names
from weft.compat.hf.ranks import gather_over_replicas
from weft.compat.modelparallel.session import state
from weft.compat.variables import DEFAULTS, FRAMEWORK, PARAMETERS
from weft.launch.discovery import discover

_READ_AT_IMPORT = ("transformers.training_args", "transformers.trainer_pt_utils", "transformers.trainer")


def enable(**settings: Any) -> None:
    """Split the model of every ``Trainer`` from now on; call it before the first ``TrainingArguments``.

    The job begins here, so every rank calls it. A second call changes settings, as ``weft.init`` does.

    Args:
        settings: weft's settings by name, see ``docs/settings.md``. ``partitions`` left out: as many as there are
            ranks, or groups of ranks that split tensors or share parameters or experts. ``microbatches`` left out:
            twice the partitions, or fewer where a batch has fewer samples.

    Raises:
        ConfigError: A setting is wrong. Nothing has been changed then.
    """
    given = {"partitions": _partitions(settings), "optimize": "auto", "prescaled_batch": True, **settings}
    state.init(given)
    os.environ[PARAMETERS] = json.dumps(given)
    os.environ[DEFAULTS] = "1"
    os.environ.setdefault(FRAMEWORK, json.dumps({"sagemaker_mpi_enabled": True}))
    enable_names()
    for name in _READ_AT_IMPORT:
        if name in sys.modules and not hasattr(sys.modules[name], "smp"):
            sys.modules[name].smp = importlib.import_module("smdistributed.modelparallel.torch")  # type: ignore[attr-defined]
            sys.modules[name].smp_gather = gather_over_replicas  # type: ignore[attr-defined]


def _partitions(settings: dict[str, Any]) -> int:
    """All ranks make one replica, or as many as share parameters or experts, if the settings say no more."""

    def degree(name: str) -> int:
        value = settings.get(name, 1)
        return value if isinstance(value, int) and value > 0 else 1

    replicas = max(degree("sharded_data_parallel_degree"), degree("expert_parallel_degree"))
    shared = degree("tensor_parallel_degree") * degree("context_parallel_degree") * replicas
    return max(1, discover(os.environ).world_size // shared)
