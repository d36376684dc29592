"""The weight of each microbatch in a step: by its samples, or by what ``weight`` of the step counts.

    gradient of a step = sum over microbatches i of  n_i / (n_1 + ... + n_m) * gradient of loss_i

Let the loss be a mean over the tokens of a microbatch. If n_i counts these tokens, the sum is the gradient of the mean
over all tokens of the batch. A script whose loss leaves out padding, but which counts samples, is warned in its first
step if the microbatches differ in padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError, warn
from weft.torch.tensors.mini_batch import MiniBatch, named_tensors, part

LOSSES = {F.cross_entropy, F.nll_loss}


def shares_of(weight: Callable[..., Any], batch: MiniBatch) -> tuple[float, ...]:
    """The share of each microbatch in the step, by the numbers that ``weight`` gives for their arguments."""
    counts = []
    with torch.no_grad():
        for index in range(batch.microbatches):
            args, kwargs = batch.slice(index)
            counts.append(float(weight(*args, **kwargs)))
    if not all(math.isfinite(count) and count >= 0 for count in counts):
        raise UsageError(
            f"the weight of this step gives {counts} for its microbatches: it must count something, the tokens of the "
            "loss say, so give numbers of at least 0"
        )
    total = sum(counts)
    return tuple(count / total if total else 1 / len(counts) for count in counts)


class Padding(TorchFunctionMode):
    """Notes, while the step is traced, which targets the mean losses leave out: their ``ignore_index``."""

    def __init__(self) -> None:
        super().__init__()
        self.done = False
        self.ignored: set[int] = set()

    def __exit__(self, *details: Any) -> None:
        self.done = True
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOSSES:
            self._look(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _look(
        self, input: Any, target: torch.Tensor, weight: Any = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        if reduction == "mean" and not target.is_floating_point():
            self.ignored.add(ignore_index)

    def warn(self, batch: MiniBatch) -> None:
        """Warn, once, if microbatches weigh alike though mean losses look at different numbers of their targets."""
        for name, argument in [*zip(batch.names, batch.args, strict=True), *batch.kwargs.items()]:
            for path, tensor in named_tensors(argument, name) if name not in batch.cut.whole else ():
                for ignored in () if tensor.is_floating_point() or tensor.is_complex() else self.ignored:
                    padded = tensor == ignored
                    axis = batch.cut.axes.get(name, 0)
                    numbers = range(batch.microbatches)
                    counts = [int((~part(padded, axis, batch.ranges(number))).sum()) for number in numbers]
                    samples = map(batch.samples, numbers)
                    if padded.any() and len({n / s for n, s in zip(counts, samples, strict=True)}) > 1:
                        shown = ", ".join(map(str, counts[:8])) + (", ..." if counts[8:] else "")
                        warn(
                            f"the loss is a mean over targets without {ignored}, and the microbatches have {shown} of "
                            f"them in {path}, but weigh by their samples: for the mean over all tokens of the batch "
                            f"let them be counted: @weft.step(weight=...), a function of the step's arguments that "
                            f"gives ({name} != {ignored}).sum()",
                        )
                        return
