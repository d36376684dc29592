"""Pretrained models that the ranks of a host cannot all hold: read by parts, in an unchanged script.

`from_pretrained` of transformers and diffusers maps the files and reads nothing, but for numbers that it converts to
another type: then every rank would hold the whole model. So a large model is read inside of
`delay_param_initialization`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.runtime.allocator import host_bytes
from weft.torch.delayed_parameters import delay_param_initialization
from weft.torch.session import current
from weft.units import format_bytes
from weft.untrusted import shown

SHARE = 0.5
"""A model is large if its files have more bytes than this part of what a rank may have of the host's memory."""
MODELING = "transformers.modeling_utils", "diffusers.models.modeling_utils"
"""The files whose `from_pretrained` is watched, and"""
CLASSES = "PreTrainedModel", "ModelMixin"
"""the class that it belongs to, in each."""
PLACED_ELSEWHERE = ("device_map", "quantization_config", "load_in_4bit", "load_in_8bit")
"""Arguments of `from_pretrained` that say where weights go, or that they are changed by kernels as they are read."""
_log = logging.getLogger("weft")


def read_by_parts(modeling: ModuleType) -> None:
    """Let `from_pretrained` leave large models without memory until they are split.

    ``modeling``: the file of the library that has the class of its models.
    """
    base = next(getattr(modeling, name) for name in CLASSES if hasattr(modeling, name))
    original = base.from_pretrained.__func__
    if original.__module__ == __name__:  # weft was initialised before
        return

    @functools.wraps(original, assigned=("__doc__", "__name__", "__qualname__"))
    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        with delay_param_initialization(_is_large(name, kwargs)):
            return original(cls, name, *args, **kwargs)

    base.from_pretrained = classmethod(from_pretrained)


def _is_large(name: Any, given: Mapping[str, Any]) -> bool:
    """True if a pipeline is to be made of the model, and its files are too large for all ranks of the host."""
    if not current.is_initialized() or current.session().pipeline is None:
        return False
    folder = _folder_of(name, str(given.get("subfolder") or ""))
    if folder is None or any(given.get(each) for each in PLACED_ELSEWHERE):
        return False
    session = current.session()
    if session.rehearsal is not None:
        return True
    held = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit = session.settings.memory_limit * 2**30 or host_bytes(session.place.local_size)
    if held <= SHARE * limit:
        return False
    if session.rank == 0:
        _log.info(
            "%s (%s) is read by parts: each rank reads what it owns, once the first step has split the model",
            shown(name),
            format_bytes(held),
        )
    return True


def _folder_of(name: Any, inside: str) -> Path | None:
    """The folder of a model's files, by its path or its name at the hub; None if they are not here yet."""
    if not isinstance(name, (str, os.PathLike)):
        return None
    if os.path.isdir(name):
        return Path(name, inside)
    from huggingface_hub import try_to_load_from_cache  # transformers needs it

    try:
        found = try_to_load_from_cache(str(name), f"{inside}/config.json".lstrip("/"))
    except ValueError:  # no name of the hub either: transformers says so
        return None
    return Path(found).parent if isinstance(found, str) else None
