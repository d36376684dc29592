"""``tsm.transform``: the model as it is, with the first rank's weights if asked for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.compat.torch_sagemaker.delayed_param import Materialized, compute_device
from weft.compat.torch_sagemaker.names import EXPERTS
from weft.compat.torch_sagemaker.state import state
from weft.errors import ConfigError, DivergenceError


def transform(
    model: nn.Module, config: Any = None, load_state_dict_from_rank0: bool = False, cp_comm_type: str = "p2p"
) -> nn.Module:
    """The model itself: no layer is cut into parts, so none has to be exchanged.

    Args:
        model: Any module.
        config: Experts over ranks, which are refused.
        load_state_dict_from_rank0: Every rank gets the first one's parameters and buffers. Its own may be on the
            device ``meta``.
        cp_comm_type: Changes nothing: sequences are not cut.
    """
    group = state.world_process_group
    if config is not None:
        raise ConfigError(f"transform got config={type(config).__name__}: {EXPERTS}")
    if load_state_dict_from_rank0:
        _take_from_first(model, group)
    return model


def _take_from_first(model: nn.Module, group: dist.ProcessGroup) -> None:
    here = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    known: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(known, (here, meta), group=group)
    if known[0][1]:
        raise ConfigError(
            f"load_state_dict_from_rank0=True, and rank 0 has no values of {known[0][1][0]}: let rank 0 make the model "
            "outside of torch.device('meta')"
        )
    for rank, (other, _) in enumerate(known):
        if other != known[0][0]:
            wrong = next(
                (
                    f"{mine} and {first}"
                    for mine, first in zip(other, known[0][0], strict=False)
                    if mine != first
                ),
                f"{len(other)} and {len(known[0][0])} tensors",
            )
            raise DivergenceError(
                f"rank {rank} and rank 0 have other models, {wrong}: make the same one on all ranks"
            )
    if meta:
        made = Materialized(torch.device("cpu"))
        for module in model.modules():
            made.fill(module)
    device = compute_device()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            values = tensor.to(device).contiguous()
            dist.broadcast(
                values.view(-1).view(torch.uint8), 0, group=group
            )  # bytes: groups carry not all types
            tensor.copy_(values)
