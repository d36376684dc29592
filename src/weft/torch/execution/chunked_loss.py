"""The heads of language models: linear layers whose result is deferred until a loss takes it in chunks.

See ``tensors.deferred_logits``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.calls.interception import intercept, interceptor_of
from weft.torch.execution.glue import running
from weft.torch.execution.thread_settings import in_microbatch
from weft.torch.execution.unit_call import UnitCall
from weft.torch.pytorch.private import call_of, defers, has_backward_hooks, has_forward_hooks, saving_hooks
from weft.torch.session.current import is_tracing
from weft.torch.tensors.deferred_linear import deferred_linear
from weft.torch.tensors.deferred_logits import Use

LEAST_BYTES = 256 << 20
"""From this size on of the logits in single precision a head defers them by itself."""
HEAD = 5
"""A layer with more than so many times as many results as inputs is taken for a head by itself."""
SEEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models whose heads are deferred, by the setting."""


class Head:
    """Stands for the call of a linear layer that a loss may follow.

    Args:
        module: The layer.
        inner: Runs its code.
        least_bytes: Results that would take less in single precision are computed at once.
    """

    runs = True

    def __init__(self, module: nn.Linear, inner: Callable[..., Any], least_bytes: int) -> None:
        self.module = module
        self.inner = inner
        self.least_bytes = least_bytes
        self.use = Use()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.use.defers:
            return self.inner(*args, **kwargs)
        x = args[0] if len(args) == 1 and not kwargs else None
        if type(x) is Tensor and x.numel() and self._may_defer(x):
            return deferred_linear(x, self.module.weight, self.module.bias, self.use)
        return self.inner(*args, **kwargs)

    def _may_defer(self, x: Tensor) -> bool:
        """True if it is worth it, and a step runs.

        Not to find a split, or what one process has; not between units, where all ranks call the same; not in an
        activation checkpoint, whose second run keeps what the first one has; not in inference mode, which counts no
        versions.
        """
        module = self.module
        size = 4 * x.numel() // module.in_features * module.out_features
        if size < self.least_bytes or not in_microbatch() or is_tracing() or x.is_inference():
            return False
        return running() is None and saving_hooks() is None and _is_plain(module)


def _is_plain(module: nn.Linear) -> bool:
    """True if the layer has all of its weight here, and nobody looks at its calls."""
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.shape == (module.out_features, module.in_features)
        and weight.device.type != "meta"
        and not (has_forward_hooks(module) or has_backward_hooks(module))
    )


def defer_heads(model: nn.Module, chunked_loss: str) -> None:
    """Let the calls of the model's linear layers with many results give deferred ones, by the setting."""
    least_bytes = _least_bytes(chunked_loss)
    if least_bytes is None or model in SEEN:
        return
    SEEN.add(model)
    for module in heads_of(model, chunked_loss):
        if _is_plain(module):
            unit = interceptor_of(module)
            if unit is None:
                intercept(module, Head(module, call_of(module), least_bytes))
            elif isinstance(unit, UnitCall) and not isinstance(unit.inner, Head):
                unit.inner = Head(module, unit.inner, least_bytes)


def _least_bytes(chunked_loss: str) -> int | None:
    return {"on": 0, "auto": LEAST_BYTES}.get(chunked_loss) if defers else None


def heads_of(model: nn.Module, chunked_loss: str) -> Iterator[nn.Linear]:
    """The linear layers whose results may be deferred, by the setting; with "on" wide layers are tried, too."""
    times = 1 if chunked_loss == "on" else HEAD
    for module in model.modules() if _least_bytes(chunked_loss) is not None else ():
        if type(module) is nn.Linear and module.out_features > times * module.in_features:
            yield module


def may_be_chunked(model: nn.Module, chunked_loss: str) -> Callable[[Tensor], bool]:
    """A function that is true for tensors as large as logits that are deferred, which autograd does not keep then."""
    heads = (one for one in heads_of(model, chunked_loss) if one.out_features > HEAD * one.in_features)
    widths = {module.out_features for module in heads}
    least = _least_bytes(chunked_loss) or 0

    def is_logits(tensor: Tensor) -> bool:
        if not widths or tensor.dim() < 2 or tensor.is_nested or not tensor.is_floating_point():
            return False
        return tensor.shape[-1] in widths and 4 * tensor.numel() >= least

    return is_logits
