"""Names that scripts read from parameters which replicas share: ``ds_tensor`` and its like.

parameter.ds_shape, ds_numel     of the whole parameter
parameter.ds_tensor              this rank's share, with ``ds_numel``; it may be written
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.torch.replicas.full_tensors import share_of


def install() -> None:
    """Let shared parameters have these names, for the whole process."""
    DTensor.ds_shape = property(lambda parameter: parameter.shape)  # type: ignore[attr-defined]
    DTensor.ds_numel = property(lambda parameter: parameter.numel())  # type: ignore[attr-defined]
    DTensor.ds_tensor = property(_share)  # type: ignore[attr-defined]


def _share(parameter: DTensor) -> Tensor:
    share: Any = share_of(parameter).detach()
    share.ds_numel = share.numel()
    return share


def flat(groups: list[dict[str, Any]]) -> list[Tensor]:
    """For each group of parameters a copy of this rank's shares in fp32, one after the other."""
    return [
        torch.cat([share_of(p).detach().float().flatten() for p in group["params"]] or [torch.empty(0)])
        for group in groups
    ]


def group_of(groups: list[dict[str, Any]]) -> Any:
    """The process group whose ranks share a parameter; None if they share none."""
    shared = (p for group in groups for p in group["params"] if isinstance(p, DTensor))
    mesh = next((p.device_mesh for p in shared), None)
    return None if mesh is None else mesh.get_group(mesh.ndim - 1)
