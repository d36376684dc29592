"""A model's weights in a file, and the comparison with them; scripts have flags for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError


def dump_model(model: nn.Module, path: str) -> None:
    """Write the weights of ``model``; every rank calls it, the first one writes."""
    from weft.torch import rank

    content = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if rank() == 0:
        torch.save(content, path)


def verify(model: nn.Module, path: str, **tolerances: Any) -> None:
    """Compare the weights of ``model`` with those in a file; every rank calls it.

    Raises :class:`UsageError` that names what differs.
    """
    known = torch.load(path, map_location="cpu", weights_only=True)
    present = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    differing = [
        name
        for name, value in known.items()
        if name not in present or not torch.allclose(present[name].cpu(), value, **tolerances)
    ]
    if differing:
        raise UsageError(f"the model differs from {path} in {', '.join(differing)}")
