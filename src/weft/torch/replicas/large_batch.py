"""Helpers for large batches: a training with many replicas learns as a training with one did.

After Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677, sections 2 and 3. With k replicas the batch is k
times as large:

    the learning rate grows by k            scale_lr
    and reaches that over the first epochs  WarmUp
    momentum that contains it, follows it   correct_momentum (torch.optim's does not contain it)
    the loss is a mean over all samples     global_batch_weight
    one shuffle of the data for all         shared_sampler
    no decay of scales, shifts and biases   decay_groups

The paper's remark 1 needs no function: scaling the loss is not the same as scaling the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from weft.errors import ConfigError, UsageError
from weft.session import ranks
from weft.torch.session import current
from weft.torch.session.collectives import broadcast_text

_NORMS = (
    nn.BatchNorm2d.__mro__[2],  # of every kind of BatchNorm and InstanceNorm
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def scale_lr(lr: float, batch_size: int, base_batch_size: int = 256, replicas: int | None = None) -> float:
    """The learning rate for the whole batch: the linear scaling rule (section 2.1).

    ``lr`` is the rate that suits ``base_batch_size``, ``batch_size`` what one replica takes at a step, ``replicas``
    how many there are. If that is not given, it is ``dp_size()``, or in a script that does not call ``weft.init`` the
    number of processes of ``torch.distributed``:

        eta = lr * batch_size * replicas / base_batch_size

    The rule holds up to a limit that depends on the task: 8192 images for ResNet-50 on ImageNet.

    >>> scale_lr(0.1, 32, replicas=256)
    3.2
    """
    if replicas is None:
        plain = not current.is_initialized() and dist.is_available() and dist.is_initialized()
        replicas = dist.get_world_size() if plain else _readers()
    faults = [
        f"{name} is {value}, it must be above 0"
        for name, value in (
            ("lr", lr), ("batch_size", batch_size), ("base_batch_size", base_batch_size), ("replicas", replicas)
        )
        if not value > 0
    ]  # fmt: skip
    if faults:
        raise ConfigError("; ".join(faults))
    return lr * batch_size * replicas / base_batch_size


class WarmUp(LinearLR):
    """Gradual warm-up (section 2.2): from ``lr / factor`` to the optimizer's ``lr``, by the same amount every step.

    The optimizer is made with the scaled rate; ``factor`` is what :func:`scale_lr` multiplied it by and ``steps`` how
    many optimizer steps the warm-up takes (five epochs in the paper). Call ``step()`` after each optimizer step. To go
    on with another schedule, put both in PyTorch's ``ChainedScheduler([WarmUp(...), MultiStepLR(...)])``;
    both count steps from the start then, as in the paper.
    """

    def __init__(self, optimizer: Optimizer, steps: int, factor: float, last_epoch: int = -1) -> None:
        if factor < 1 or not math.isfinite(factor) or steps < 1:
            raise ConfigError(
                f"WarmUp got steps={steps} and factor={factor}: steps is at least 1, and factor how many times the "
                "base rate the scaled one is, so at least 1"
            )
        super().__init__(optimizer, start_factor=1 / factor, total_iters=steps, last_epoch=last_epoch)


def correct_momentum(optimizer: Optimizer, buffer: str = "momentum_buffer") -> RemovableHandle:
    """Momentum correction (remark 2) for an optimizer whose momentum contains the learning rate.

    Such an optimizer keeps ``v = m * v + lr * g`` and subtracts ``v``. When the rate changes, its momentum has to
    change with it: before a step with a new rate, each parameter's state ``buffer`` is multiplied by ``new / old``.
    ``torch.optim.SGD`` keeps ``u = m * u + g`` and subtracts ``lr * u``: it needs no correction and is refused.

    Returns a handle whose ``remove()`` ends it.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, SGD):
        raise UsageError(
            "torch.optim.SGD needs no momentum correction: its momentum does not contain the learning rate"
        )
    rates: list[float] = []

    def correct(_: Any, args: Any, kwargs: Any) -> None:
        now = [float(group["lr"]) for group in inner.param_groups]
        for group, old, new in zip(inner.param_groups, rates, now, strict=False):
            if old and new != old:
                for parameter in group["params"]:
                    kept = inner.state.get(parameter, {}).get(buffer)
                    if isinstance(kept, Tensor):
                        kept.mul_(new / old)
        rates[:] = now

    return inner.register_step_pre_hook(correct)


def global_batch_weight(samples: float) -> float:
    """The weight of a replica's mean loss, so that averaged gradients are those of the mean over all samples (remark
    3).

    ``samples`` is how many this replica's mean was taken over in this step: rows, or the tokens that count. With equal
    numbers everywhere the weight is 1, and nothing of this is needed. Collective over the replicas; call it before the
    step and multiply the loss by it in the step:

        weight_r = samples_r * replicas / sum(samples)
    """
    if samples < 0 or not math.isfinite(samples):
        raise ConfigError(f"samples is {samples}, it must be a number of at least 0")
    session = current.session()
    session.need_all_replicas("global_batch_weight()")
    replicas = session.mesh.rdp
    if replicas == 1:
        return 1.0
    total = torch.tensor([float(samples)], dtype=torch.float64)
    with session.doing("global_batch_weight()"):
        dist.all_reduce(total, group=session.group("rdp"))
    if not total.item():
        raise ConfigError(
            "no replica has any samples in this step, so that the loss has no mean: skip the step"
        )
    return float(samples * replicas / total.item())


def shared_sampler(
    dataset: Dataset[Any] | Sized, shuffle: bool = True, drop_last: bool = False, seed: int | None = None
) -> DistributedSampler[Any]:
    """One shuffle of the data, divided among the replicas (remark 4): a ``DistributedSampler`` by ``dp_rank()``.

    ``seed``: if not given, that of rank 0 (``torch.initial_seed()``); collective then. Call ``set_epoch(epoch)`` on it
    before each epoch.
    """
    session = current.session()
    if seed is None:
        session.need_all_replicas("shared_sampler() without seed=")
        with session.doing("shared_sampler()"):
            seed = int(broadcast_text(str(torch.initial_seed() % (1 << 31)), 0, session.group("world")))
    return DistributedSampler(
        dataset,  # type: ignore[arg-type]
        num_replicas=_readers(),
        rank=ranks.dp_rank() if session.reads == "dp" else ranks.rdp_rank(),
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: no decay for biases and for scales and shifts of normalisation (section 5.1).

    A parameter that is shared with another module counts as decayed if it is so anywhere.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> [(len(group["params"]), group["weight_decay"]) for group in decay_groups(model, 1e-4)]
    [(1, 0.0001), (3, 0.0)]
    """
    if not weight_decay >= 0:
        raise ConfigError(f"weight_decay is {weight_decay}, it must be at least 0")
    decayed: dict[int, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            exempt = isinstance(module, _NORMS) or name == "bias" or name.endswith("_bias")
            decayed[id(parameter)] = decayed.get(id(parameter), False) or not exempt
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if decayed[id(p)] is wanted], "weight_decay": decay}
        for wanted, decay in ((True, weight_decay), (False, 0.0))
    ]


def _readers() -> int:
    """The number of ranks that read different samples."""
    return ranks.dp_size() if current.session().reads == "dp" else ranks.rdp_size()
