"""Placeholders for what calls on other partitions have put into containers; see `weft.torch.calls.container_writes`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.torch.pytorch import torch_functions
from weft.torch.pytorch.private import no_torch_function
from weft.torch.tensors.nested import tensors_in


class Left(Tensor):
    """A remote entry: what a call on another partition has put into a container, seen by modules that it is not sent
    to.

    ``_weft_of``: its partition, and the module that has left it.
    """

    _weft_of: tuple[int, str]
    _weft_device: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = getattr(func, torch_functions.STANDS_FOR, func)
        with no_torch_function():
            found = next(each for each in tensors_in((args, kwargs)) if isinstance(each, Left))
            if func in torch_functions.PLACE_GETTERS:
                return torch_functions.PLACE_GETTERS[func](found._weft_device)
            if func in torch_functions.METADATA:
                return func(*args, **(kwargs or {}))
            shape = list(found.shape)
        owner, module = found._weft_of
        raise UsageError(
            f"a tensor of shape {shape} that {module} has put into a list, dict or object (a cache of keys "
            f"and values, say) lies on partition {owner}, and a module on another partition uses it that did not do "
            "so in the first microbatch of the first step, so that it was not sent: let that microbatch use it, too, "
            "or keep both modules on one partition with weft.set_partition(module, index). The function that "
            "@weft.step decorates may use it at any time, as may the code between modules"
        )


def mark_left(tensor: Tensor, module: str, owner: int, device: torch.device) -> None:
    """Let a placeholder on this rank be a `Left`."""
    marked: Any = tensor
    if type(tensor) is Tensor:
        marked.__class__ = Left
        marked._weft_of, marked._weft_device = (owner, module), device
