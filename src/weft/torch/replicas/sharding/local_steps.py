"""Steps of optimizers on the local tensors of DTensors (FSDP2), whose operations PyTorch may not know for DTensors.

Optimizers that update each number for itself compute the same on the rows that a rank has. Their states are DTensors
between steps, for saves and scripts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.torch.offload.partial_steps import in_calls
from weft.torch.replicas.full_tensors import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class LocalSteps:
    """The steps of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._locals: dict[int, nn.Parameter] = {}
        """By the ids of parameters, which the optimizer keeps alive: the same memory, as a plain parameter."""

    @torch.no_grad()
    def step(self) -> Any:
        """One step; the optimizer's hooks see DTensors."""
        with in_calls(self._optimizer, "sharded_data_parallel_degree") as call, self._on_locals():
            return call()

    @contextmanager
    def _on_locals(self) -> Iterator[None]:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        before = [group["params"] for group in groups]
        sharded = [weight for weights in before for weight in weights if is_sharded(weight)]
        locals_of = {id(weight): self._local(weight) for weight in sharded}
        wrapped = {id(weight): dict(state.pop(weight, {})) for weight in sharded}
        for weight in sharded:
            if entry := wrapped[id(weight)]:
                state[locals_of[id(weight)]] = {
                    key: value.to_local() if is_sharded(value) else value for key, value in entry.items()
                }
        for group, weights in zip(groups, before, strict=True):
            group["params"] = [locals_of.get(id(weight), weight) for weight in weights]
        try:
            yield
        finally:
            for group, weights in zip(groups, before, strict=True):
                group["params"] = weights
            for weight in sharded:
                local = locals_of[id(weight)]
                local.grad = None
                if entry := state.pop(local, {}):
                    known = wrapped[id(weight)]
                    state[weight] = {
                        key: _as_before(value, known.get(key), weight) for key, value in entry.items()
                    }

    def _local(self, weight: DTensor) -> nn.Parameter:
        """The rank's rows of a parameter, with their gradient."""
        values, local = weight.to_local(), self._locals.get(id(weight))
        if local is None or local.data_ptr() != values.data_ptr() or local.shape != values.shape:
            local = self._locals[id(weight)] = nn.Parameter(values.detach(), weight.requires_grad)
        local.requires_grad_(weight.requires_grad)
        grad: Any = weight.grad
        local.grad = grad.to_local() if is_sharded(grad) else grad
        return local


def _as_before(value: Any, known: Any, weight: DTensor) -> Any:
    """A state as a DTensor if it belongs to each number of the weight; the same one where it was changed in place."""
    if is_sharded(known) and known.to_local() is value:
        return known
    if not isinstance(value, Tensor) or not value.dim() or value.shape != weight.to_local().shape:
        return value
    from torch.distributed.tensor import DTensor  # loaded, as the weight is one

    return DTensor.from_local(
        value,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
