"""Hugging Face's Trainer with a split model, where its own code for one is missing or too old."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from weft.compat.session import state


def install(trainer: ModuleType) -> None:
    """Change ``transformers.trainer.Trainer``, as far as ``smp.init()`` has been called when it is used."""
    cls = trainer.Trainer
    if hasattr(cls, "_prepare_for_training"):  # older ones make the optimizer by themselves
        _make_optimizer_after_wrapping(trainer, cls)
    _write_random_states_once(cls)


def _make_optimizer_after_wrapping(trainer: ModuleType, cls: Any) -> None:
    """The Trainer makes its optimizer late for a split model, and since its version 5 not at all."""
    wrap = cls._wrap_model

    @functools.wraps(wrap)
    def wrap_model(self: Any, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        wrapped = wrap(self, model, training, *args, **kwargs)
        if training and state.initialized and trainer.is_sagemaker_mp_enabled() and self.optimizer is None:
            self.create_optimizer()
        return wrapped

    cls._wrap_model = wrap_model


def _write_random_states_once(cls: Any) -> None:
    """The file has a name for each replica, so the ranks of a pipeline would all write the same one at once."""
    save = cls._save_rng_state

    @functools.wraps(save)
    def save_rng_state(self: Any, output_dir: str) -> None:
        from weft.torch.ranks import pp_rank

        if not state.initialized or pp_rank() == 0:
            save(self, output_dir)

    cls._save_rng_state = save_rng_state
