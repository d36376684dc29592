"""A user's step runs and leaves nothing behind: gradients, parameters, buffers and random states are as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.torch.backward.autograd import Forget
from weft.torch.pytorch.private import storage_key, tables_of
from weft.torch.pytorch.torch_functions import memory_written
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, Streams
from weft.torch.trace.kept_state import Kept


def forget_grad(parameter: Tensor) -> None:
    """Drop a parameter's gradient: the trace needs none, so none takes memory until the end of the trace."""
    parameter.grad = None


class ParameterWrites(TorchFunctionMode):
    """Keeps the values of those parameters of ``root`` that are written while this is active, and brings them back.

    To copy all parameters would take as much memory again, and hardly any model writes into a parameter.
    """

    _harmless = frozenset(
        {Tensor.grad.__set__, Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined,union-attr]
    )
    """What changes a tensor, but not its values."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._own: dict[int, list[nn.Parameter]] = {}
        for parameter in root.parameters():
            if parameter.device.type != "meta":
                self._own.setdefault(storage_key(parameter), []).append(parameter)
        self._kept: dict[nn.Parameter, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for target in memory_written(func, args, kwargs or {}) if func not in self._harmless else ():
            for parameter in self._own.get(storage_key(target), ()):
                if parameter not in self._kept:
                    self._kept[parameter] = parameter.detach().clone()
        return func(*args, **(kwargs or {}))

    def written(self) -> set[int]:
        """The storages of the parameters that were ever written."""
        return {storage_key(parameter) for parameter in self._kept}

    def undo(self) -> None:
        """Give the parameters that were ever written what they held before."""
        for parameter, content in self._kept.items():
            parameter.detach().copy_(content)


@contextmanager
def without_side_effects(
    root: nn.Module,
    streams: Streams,
    forget: Callable[[Tensor], None] | None = forget_grad,
    writes: ParameterWrites | None = None,
    kept: Kept | None = None,
) -> Iterator[None]:
    """Whatever runs inside leaves parameters, buffers, plain attributes and random states as they were.

    ``forget`` is called with each parameter that got its gradient, and drops the gradient at once. Without ``forget``
    gradients go at the end. ``writes`` gives written parameters their values back. ``kept`` brings back what else was
    noted.
    """
    numpy, streams.numpy = streams.numpy, True
    states = streams.capture(TORCH | PYTHON | NUMPY)
    grads = [(parameter, parameter.grad) for parameter in root.parameters()]
    needed = [parameter.requires_grad for parameter, _ in grads]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in root.modules()
        for name, buffer in tables_of(module)[1].items()
    ]
    plain = [
        (
            module,
            {k: v for k, v in vars(module).items() if v is None or isinstance(v, (bool, int, float, str))},
        )
        for module in root.modules()
    ]
    handles = []
    for parameter, _ in grads:
        parameter.grad = None
        if forget is not None and parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(Forget(forget)))
    try:
        yield
    finally:
        if writes is not None:
            writes.undo()
        for handle in handles:
            handle.remove()
        for (parameter, grad), need in zip(grads, needed, strict=True):
            parameter.requires_grad_(need).grad = grad
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                tables_of(module)[1][name] = buffer
                if buffer is None or content is None or buffer.device.type == "meta":
                    continue
                if not torch.equal(buffer, content):
                    buffer.copy_(content)
        for module, values in plain:
            vars(module).update(values)
        if kept is not None:
            kept.bring_back()
        streams.restore(states)
        streams.numpy = numpy
