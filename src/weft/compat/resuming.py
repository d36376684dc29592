"""``smp.resume_from_checkpoint``: weft's, which also finds a model in safetensors under the name of a ``.bin`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.torch import resume_from_checkpoint as weft_resume_from_checkpoint

_TRAINER_NAME = "pytorch_model.bin"
_INSTEAD = ("model.safetensors", "model.safetensors.index.json")


def resume_from_checkpoint(
    path: str | Path, tag: str | None = None, partial: bool = True, *args: Any, **kwargs: Any
) -> Any:
    """Go on where a saved job was; see :func:`weft.torch.resume_from_checkpoint` for arguments and errors.

    Hugging Face's Trainer asks for the file ``pytorch_model.bin`` although it has written safetensors: those are read.
    """
    there = [name for name in _INSTEAD if (Path(path) / name).exists()]
    if not partial and tag == _TRAINER_NAME and there and not (Path(path) / tag).exists():
        tag = None
    return weft_resume_from_checkpoint(path, tag, partial, *args, **kwargs)
