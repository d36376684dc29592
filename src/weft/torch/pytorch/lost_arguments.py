"""Functions of PyTorch that lose an argument on the way to tensors of other classes, and what stands in their place.

PyTorch's functions hand their arguments on to ``__torch_function__``. These forget one: ``l1_loss`` its weight, and
``chain_matmul`` where to write. A placeholder would give another loss than a plain tensor, in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from weft.torch.pytorch.torch_functions import STANDS_FOR


class _Torch:
    """PyTorch's own."""

    l1_loss = staticmethod(F.l1_loss)
    chain_matmul = staticmethod(torch.chain_matmul)


def _stands_for(old: Any) -> Callable[[Any], Any]:
    """A function that is found by the name of ``old``, and known as it."""

    def named(new: Any) -> Any:
        setattr(functools.wraps(old)(new), STANDS_FOR, old)
        return new

    return named


@_stands_for(_Torch.l1_loss)
def _l1_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if weight is None or not has_torch_function((input, target, weight)):
        given = {} if weight is None else {"weight": weight}
        return _Torch.l1_loss(input, target, size_average, reduce, reduction, **given)
    if weight.size() != input.size():
        raise ValueError("Weights and input must have the same size.")
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    weighted: Tensor = _Torch.l1_loss(input, target, reduction="none") * weight
    if reduction == "none":
        return weighted
    return weighted.sum() if reduction == "sum" else weighted.sum() / weight.sum()


@_stands_for(_Torch.chain_matmul)
def _chain_matmul(*matrices: Any, out: Tensor | None = None) -> Tensor:
    if out is None or not has_torch_function((*matrices, out)):
        result: Tensor = _Torch.chain_matmul(*matrices, out=out)
        return result
    result = torch.linalg.multi_dot(matrices[0] if len(matrices) == 1 else matrices, out=out)
    return result


REPLACED = ((_Torch.l1_loss, _l1_loss), (_Torch.chain_matmul, _chain_matmul))
