"""Communication hooks, as PyTorch's DDP has them, on the buckets of weft's reducer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.reduce.collective import Work


class GradientBucket:
    """The bucket that a hook gets, with the interface of ``torch.distributed.GradBucket``."""

    def __init__(
        self, number: int, flat: Tensor, views: list[Tensor], parameters: list[nn.Parameter], last: bool
    ) -> None:
        self._number = number
        self._flat = flat
        self._views = views
        self._parameters = parameters
        self._last = last

    def index(self) -> int:
        """The bucket's number; hooks are called in this order."""
        return self._number

    def buffer(self) -> Tensor:
        """This rank's gradients of the bucket as one flat tensor, not divided by anything."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another flat tensor in the place of the present one."""
        self._flat = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients, as views into the flat tensor."""
        return self._views

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients these are."""
        return self._parameters

    def is_last(self) -> bool:
        """True if this is the last bucket of the step."""
        return self._last


class _Result:
    def __init__(self, future: Any, flat: Tensor) -> None:
        self._future = future
        self._flat = flat

    @torch.no_grad()
    def wait(self) -> None:
        found = self._future.wait()
        found = found[0] if isinstance(found, (list, tuple)) else found
        if not isinstance(found, Tensor) or found.numel() != self._flat.numel():
            raise UsageError(
                f"a communication hook gave {type(found).__name__} where it should give a future of one tensor with "
                f"{self._flat.numel()} values: return fut.then(lambda done: done.value()[0])"
            )
        if found.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(found.view_as(self._flat))


class HookQueue:
    """Sends buckets through ``hook(state, bucket)``, which returns a future of the averaged flat tensor.

    ``find(number)``: the bucket's views, parameters, and whether it is the last.
    """

    scale = 1.0

    def __init__(
        self,
        state: object,
        hook: Callable[[Any, Any], Any],
        find: Callable[[int], tuple[list[Tensor], list[nn.Parameter], bool]],
    ) -> None:
        self._state = state
        self._hook = hook
        self._find = find

    def forget(self) -> None:
        """Nothing to forget: what a hook keeps is the hook's own."""

    def in_place(self, size_bytes: int) -> None:
        """None: a hook takes flat tensors."""

    def launch(self, number: int, flat: Tensor) -> Work:
        """Call the hook."""
        return _Result(self._hook(self._state, GradientBucket(number, flat, *self._find(number))), flat)
