"""``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``: weft's, with what the original took and read.

A script that hands over any object, a configuration say, has it saved: calling the original said that pickling is all
right. Reading runs code of whoever wrote the file, so it is safe unless the job was started with ``--allow-pickle``:
numbers, texts and tensors are read, and the log names what was left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from weft.communication.serialise import Unread
from weft.compat.variables import ALLOW_PICKLE
from weft.errors import CheckpointError
from weft.torch import load as weft_load
from weft.torch import rank
from weft.torch import resume_from_checkpoint as weft_resume_from_checkpoint
from weft.torch import save_checkpoint as weft_save_checkpoint
from weft.torch.checkpoint.formats.source import open_source
from weft.torch.session import current as session_of
from weft.torch.tensors.pytree import nodes_with_paths

log = logging.getLogger("weft")
_TRAINER_NAME = "pytorch_model.bin"
_INSTEAD = ("model.safetensors", "model.safetensors.index.json")


def save_checkpoint(*args: Any, allow_pickle: bool = True, **kwargs: Any) -> Any:
    """Save the state of the job; see :func:`weft.torch.save_checkpoint` for arguments and errors.

    ``user_content`` may hold objects of any class that can be pickled.
    """
    return weft_save_checkpoint(*args, allow_pickle=allow_pickle, **kwargs)


def load(*args: Any, **kwargs: Any) -> Any:
    """The state that ``save`` or ``torch.save`` wrote; see :func:`weft.torch.load` for arguments and errors.

    Pickled objects are read if the launch (``--allow-pickle``) says so.
    """
    kwargs.setdefault("allow_pickle", os.environ.get(ALLOW_PICKLE) == "1")
    return weft_load(*args, **kwargs)


def resume_from_checkpoint(
    path: str | Path, tag: str | None = None, partial: bool = True, *args: Any, **kwargs: Any
) -> Any:
    """Go on where a saved job was; see :func:`weft.torch.resume_from_checkpoint` for arguments and errors.

    Hugging Face's Trainer asks for the file ``pytorch_model.bin`` although it has written safetensors: those are read.
    Pickled objects are left out, unless ``allow_pickle`` or the launch (``--allow-pickle``) says that they may be read.
    """
    there = [name for name in _INSTEAD if (Path(path) / name).exists()]
    if not partial and tag == _TRAINER_NAME and there and not (Path(path) / tag).exists():
        tag = None
        kwargs.setdefault("translate_function", _own_names(Path(path), kwargs.get("model")))
    kwargs.setdefault("allow_pickle", True if os.environ.get(ALLOW_PICKLE) == "1" else "leave")
    content = weft_resume_from_checkpoint(path, tag, partial, *args, **kwargs)
    unread = [name for name, node in nodes_with_paths(content, "user_content") if isinstance(node, Unread)]
    if unread and rank() == 0:
        log.warning(
            "%s: pickled, and left out, because reading it may run any code. If you trust whoever wrote %s, start the "
            "job with weft run --allow-pickle (%s=1), or pass allow_pickle=True", ", ".join(unread), path, ALLOW_PICKLE,
        )  # fmt: skip
    return content


def _own_names(folder: Path, model: Any) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """A function that gives a state published by Hugging Face the names that the model has here; None if they are the
    same.

    Since its version 5 ``transformers`` gives tensors other names in the model than in files, and joins some.
    """
    module = next((m.module for m in ([model] if model is not None else session_of.session().models)), None)
    read = getattr(type(module), "from_pretrained", None)
    if module is None or read is None:
        return None
    with suppress(CheckpointError):  # it is read once more, and refused, where all ranks do it
        if set(open_source(folder, False).shapes) <= set(module.state_dict()):
            return None
    config = module.config

    def renamed(state: dict[str, Any]) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):  # a model is made, and filled
            return dict(read(None, config=config, state_dict=state).state_dict())

    return renamed
