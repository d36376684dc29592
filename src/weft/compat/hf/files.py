"""The files that Hugging Face's Trainer writes and reads for a split model.

They are those of a Trainer in one process: any layout goes on from any other's, and the plain Trainer from both.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.compat.later import later
from weft.compat.modelparallel.session import state
from weft.errors import CheckpointError

OPTIMIZER = "optimizer.pt"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
WHOLE = (
    "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json",
)  # fmt: skip
"""The first one stands for all, see ``weft.compat.modelparallel.resuming``."""


def install(trainer: ModuleType, as_in_one_process: Callable[[], AbstractContextManager[None]]) -> None:
    """Change ``transformers.trainer.Trainer``, as far as ``smp.init()`` has been called when it is used.

    ``as_in_one_process``: inside, the Trainer's code does not know that the model is split.
    """
    cls = trainer.Trainer
    _write_random_states_once(cls)
    _write_whole_optimizers(trainer, cls, as_in_one_process)
    load, best = cls._load_from_checkpoint, cls._load_best_model

    @functools.wraps(load)
    def load_from_checkpoint(self: Any, folder: str, model: Any = None) -> None:
        if not (state.initialized and trainer.is_sagemaker_mp_enabled() and read(self, folder)):
            load(self, folder, model)

    @functools.wraps(best)
    def load_best_model(self: Any) -> None:
        folder = self.state.best_model_checkpoint
        if not (state.initialized and trainer.is_sagemaker_mp_enabled() and read(self, folder)):
            best(self)

    cls._load_from_checkpoint, cls._load_best_model = load_from_checkpoint, load_best_model
    save = cls.save_model

    @functools.wraps(save)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save, then wait for the other replicas: all look for the folder next, and with smddp nobody waits for it."""
        save(self, output_dir, _internal_call)
        if _internal_call and trainer.is_sagemaker_dp_enabled() and torch.distributed.is_initialized():
            torch.distributed.barrier()

    cls.save_model = save_model


def read(trainer: Any, folder: str) -> bool:
    """Load the weights of a checkpoint into the Trainer's split model; False if there are none.

    The Trainer's own code does not say which model it means, and reads adapters into whole models only.
    """
    model = trainer.model_wrapped
    there = [name for name in (*WHOLE, *ADAPTERS) if os.path.exists(os.path.join(folder, name))]
    if not there:
        return False
    if there[0] in WHOLE:
        later("resume_from_checkpoint")(folder, WHOLE[0], partial=False, load_optimizer=False, model=model)
        return True
    adapter, *others = trainer.model.active_adapters
    if others:
        raise CheckpointError(
            f"{folder}: the model has the adapters {adapter}, {', '.join(others)}: resume with one"
        )
    found = importlib.import_module("peft.utils.save_and_load").load_peft_weights(folder, device="cpu")
    own = {name for name in trainer.model.state_dict() if f".{adapter}." in name}
    names = {_in_a_file(name, adapter): name for name in own}
    names |= {
        name: name for name in trainer.model.state_dict() if name in found
    }  # embeddings may be with them
    unknown = sorted(name for name in found if name not in names)
    missing = sorted(name for name, inside in names.items() if inside in own and name not in found)
    if unknown:
        raise CheckpointError(
            f"{Path(folder, there[0])} has {unknown[0]} and {len(unknown) - 1} others that are no part of the adapter "
            f"{adapter}: resume with the adapter that was saved"
        )
    if missing:
        raise CheckpointError(
            f"{Path(folder, there[0])} lacks {missing[0]} and {len(missing) - 1} others of the adapter {adapter}: "
            "resume with the adapter that was saved"
        )
    model.load_state_dict({names[name]: value for name, value in found.items()}, strict=False)
    return True


def _in_a_file(name: str, adapter: str) -> str:
    """The name that PEFT gives a tensor of an adapter in a file; modules trained whole keep the model's."""
    return name.replace(f".modules_to_save.{adapter}.", ".", 1).replace(f".{adapter}.", ".", 1)


def _write_random_states_once(cls: Any) -> None:
    """Let one rank of each replica write random states: all its ranks have one name for the file."""
    save = cls._save_rng_state

    @functools.wraps(save)
    def save_rng_state(self: Any, output_dir: str) -> None:
        from weft.session.ranks import mp_rank

        if not state.initialized or mp_rank() == 0:
            save(self, output_dir)

    cls._save_rng_state = save_rng_state


class _Whole:
    """Stands for the optimizer while its state is written, which all ranks have gathered."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


def _write_whole_optimizers(
    trainer: ModuleType, cls: Any, as_in_one_process: Callable[[], AbstractContextManager[None]]
) -> None:
    """Let the optimizer's state be one file with all of it. Older ones, a file for each rank, are read, too."""
    save, load = cls._save_optimizer_and_scheduler, cls._load_optimizer_and_scheduler

    @functools.wraps(save)
    def save_optimizer(self: Any, output_dir: str) -> None:
        if not (state.initialized and trainer.is_sagemaker_mp_enabled()):
            save(self, output_dir)
            return
        optimizer = self.optimizer
        self.optimizer = _Whole(optimizer.state_dict())
        try:
            with as_in_one_process():
                save(self, output_dir)
        finally:
            self.optimizer = optimizer

    @functools.wraps(load)
    def load_optimizer(self: Any, checkpoint: str | None) -> None:
        splits = state.initialized and trainer.is_sagemaker_mp_enabled()
        if splits and checkpoint is not None and Path(checkpoint, OPTIMIZER).is_file():
            with as_in_one_process():
                load(self, checkpoint)
            return
        if splits and checkpoint is not None:
            _check_parts(Path(checkpoint))
        load(self, checkpoint)

    cls._save_optimizer_and_scheduler, cls._load_optimizer_and_scheduler = save_optimizer, load_optimizer


def _check_parts(folder: Path) -> None:
    """Refuse states of single ranks that were saved by another layout: each rank would read its own file only."""
    from weft.torch.session.current import session

    parts = [path.name.removeprefix(f"{OPTIMIZER}_").split("_") for path in folder.glob(f"{OPTIMIZER}_*")]
    found = tuple(len({part[at] for part in parts if len(part) == 2}) for at in (0, 1))
    here = session().mesh.pp, session().mesh.tp
    if parts and found != here:
        raise CheckpointError(
            f"{folder} has the optimizer's state in shards of {found[0]} partitions and {found[1]} ranks that split "
            f"tensors, but this job has {here[0]} and {here[1]}: resume with that layout once; what is saved then fits "
            "every layout"
        )
