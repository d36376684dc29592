"""``torch.nn.utils.clip_grad_norm_`` on the parameters of a split model means the norm over all of its ranks.

The original left it to scripts to put the ranks' norms together, and scripts (Hugging Face's Trainer among them) do
not: each rank then scales its gradients by another factor. Whether the ranks have to talk follows from the owners of
the given parameters alone, so it is the same on every rank that is given the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_installed = False


def install() -> None:
    """Put the wider meaning in place, once for the process."""
    global _installed
    if _installed:
        return
    _installed = True
    original = torch.nn.utils.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners = {getattr(parameter, "_weft_owner", None) for parameter in given} - {None}
        if len(owners) < 2:
            return original(given, max_norm, norm_type, error_if_nonfinite, foreach)
        from weft.torch.optimizer import clip_grad_norm_ as clip_over_ranks

        return clip_over_ranks(given, max_norm, norm_type, error_if_nonfinite)

    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
