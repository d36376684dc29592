"""Hugging Face's Trainer makes its optimizer late for a split model, and since its version 5 not at all."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from weft.compat.session import state


def install(trainer: ModuleType) -> None:
    """Let ``transformers.trainer.Trainer`` make its optimizer when it has wrapped the model for training."""
    cls = trainer.Trainer
    if not hasattr(cls, "_prepare_for_training"):
        return  # an older one, which makes it by itself
    wrap = cls._wrap_model

    @functools.wraps(wrap)
    def wrap_model(self: Any, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        wrapped = wrap(self, model, training, *args, **kwargs)
        if training and state.initialized and trainer.is_sagemaker_mp_enabled() and self.optimizer is None:
            self.create_optimizer()
        return wrapped

    cls._wrap_model = wrap_model
