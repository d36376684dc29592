"""Fakes of what a rehearsal's machine does not have: other ranks, GPUs, memory for the weights.

`torch.distributed` gets PyTorch's own fake process group, calls for CUDA mean the CPU, and large tensors that a
module's `__init__` makes are on the meta device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError
from weft.launch.rehearsal import Asked
from weft.torch.delayed_parameters import FACTORIES, SMALL, moved

DEVICES = (str, torch.device)
NOTHING: dict[str, Any] = {
    "set_device": None, "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None,
    "max_memory_allocated": 0, "memory_allocated": 0, "max_memory_reserved": 0, "memory_reserved": 0,
    "current_device": 0,
}  # fmt: skip
"""Functions of `torch.cuda`, and what they give here."""


def install() -> None:
    """From now on, for the whole process."""
    for name, value in NOTHING.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    torch.compile = _uncompiled
    dist.init_process_group = _init_process_group
    autocast = torch.autocast.__init__

    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = on_cpu  # type: ignore[method-assign]
    nn.parallel.DistributedDataParallel.__init__ = _refuse_ddp  # type: ignore[method-assign]
    FakeHardware().__enter__()


def _uncompiled(model: Any = None, **options: Any) -> Any:
    """Compiling changes neither sizes nor results."""
    return model if model is not None else lambda given: given


def _refuse_ddp(self: Any, *args: Any, **kwargs: Any) -> None:
    raise UsageError(
        "weft rehearse is for scripts that wrap their model in weft.DistributedModel and decorate their step: this one "
        "uses DistributedDataParallel"
    )


def _init_process_group(*args: Any, **kwargs: Any) -> None:
    """A group of as many ranks as the job would have, none of which is there."""
    asked = Asked.from_environ(os.environ)
    if asked is not None and not dist.is_initialized():
        begin_group(asked.ranks)


def begin_group(ranks: int) -> None:
    """PyTorch's fake process group: collectives return at once, with this rank's own values."""
    hook = sys.excepthook
    _original(backend="fake", rank=0, world_size=ranks)
    sys.excepthook = hook  # PyTorch's own puts the rank before each line


_original: Callable[..., None] = dist.init_process_group


def _is_device(given: Any) -> bool:
    return isinstance(given, DEVICES)


def _is_cuda(given: Any) -> bool:
    return isinstance(given, DEVICES) and str(given).partition(":")[0] == "cuda"


def _builds_module() -> bool:
    """True if a module's `__init__` is running."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class FakeHardware(TorchFunctionMode):
    """Large tensors of modules have no memory, and CUDA is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        if (
            func in FACTORIES
            and kwargs.get("device") is None
            and kwargs.get("out") is None
            and _builds_module()
        ):
            made = func(*args, **{**kwargs, "device": "meta"})
            return made if made.numel() > SMALL else func(*args, **kwargs)
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            return moved(args[0], _is_device if args[0].is_meta else _is_cuda, *args[1:], **kwargs)
        return func(*args, **kwargs)
