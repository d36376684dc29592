"""The same training as `compare.train_alone`, split over the ranks of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import weft.torch as weft
from tests.training import step_of

from .compare import LossOf, Record, copies, first_names, gradients, on_device

OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def train_split(
    net: nn.Module,
    batches: Sequence[Any],
    loss_of: LossOf,
    optimizer_of: OptimizerOf,
    zero_grad: bool = True,
    places: Mapping[str, int] | None = None,
    **model_options: Any,
) -> Record:
    """Trains `net` with the settings of the last `weft.init`; the record has this rank's own tensors.

    `places` puts modules of `net` on partitions, by name. The whole state is in the record too: gathering it
    is a collective, so every rank must come here.
    """
    names = first_names(net)
    model = weft.DistributedModel(net, **model_options)
    for module, partition in (places or {}).items():
        weft.set_partition(net.get_submodule(module), partition)
    optimizer = weft.DistributedOptimizer(optimizer_of(model.parameters()))
    train_step, record = step_of(loss_of), Record()
    for batch in map(on_device, batches):
        if zero_grad:
            optimizer.zero_grad()
        record.losses.append(train_step(model, batch).reduce_mean().item())
        record.gradients.append(gradients(model.local_named_parameters(), names))
        optimizer.step()
    record.parameters = copies(model.local_named_parameters(), names)
    record.buffers = copies(model.local_named_buffers())
    whole = model.state_dict()
    record.state = copies((name, value) for name, value in whole.items() if torch.is_tensor(value))
    return record
