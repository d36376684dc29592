"""An optimizer's step: its weights come to the device, and it is refused where it would need more than it has."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Adafactor, Optimizer

from weft.errors import UsageError
from weft.torch.replicas.full_tensors import is_sharded
from weft.torch.replicas.optimizer_trials import (
    is_of_torch,
    looks_at_several,
    updates_parts_alike,
    updates_weights_alone,
)
from weft.torch.session import current
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import cut_of
from weft.torch.tensors.marks import WRAPPED


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, as it has them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def wrapper_of(optimizer: Optimizer) -> Any:
    """The ``DistributedOptimizer`` that steps an optimizer; None if none does."""
    wrapper = getattr(optimizer, WRAPPED, None)
    return None if wrapper is optimizer else wrapper


def host_weights_of(session: Session) -> Iterator[Any]:
    """The weights of each model that wait in host memory."""
    return (model.host_weights for model in session.models if model.host_weights is not None)


@contextmanager
def on_device(session: Session, weights: Sequence[Tensor], values: bool = False) -> Iterator[None]:
    """Inside, weights that wait in host memory are on the device; ``values``: with their values, all at once.

    Otherwise an optimizer's step brings those that have gradients, see ``interceptions``.
    """
    with ExitStack() as stack:
        for each in host_weights_of(session):
            stack.enter_context(each.on_device(weights, values))
        yield


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """The weights that an optimizer updates; in place of copies that it steps on those that they are of."""
    wrapper = wrapper_of(optimizer)
    if wrapper is None:
        return parameters_of(optimizer)
    return [weight for weight, _ in wrapper.stepped_on()]


_outside: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Tensor]]] = weakref.WeakKeyDictionary()
"""How many parameters an optimizer had, and those of them that were in no wrapped model."""


def refuse_outsiders(optimizer: Optimizer, session: Session) -> None:
    """Refuse an optimizer that updates parameters of a wrapped model together with others, where there are replicas.

    Nobody averages gradients of the others.
    """
    if session.mesh.rdp == 1 or not session.models:
        return
    parameters = weights_of(optimizer)
    count, outside = _outside.get(optimizer, (-1, []))
    if count != len(parameters):
        known = {id(parameter) for model in session.models for parameter in model.parameters()}
        outside = [each for each in parameters if id(each) not in known]
        if len(outside) == len(parameters):  # of something else than this training
            outside = []
        _outside[optimizer] = len(parameters), outside
    for each in outside:
        if each.grad is not None:
            raise UsageError(
                f"{type(optimizer).__name__} updates a parameter of shape {list(each.shape)} that is in no wrapped "
                "model, so nobody averages its gradient over the replicas, and each would train its own: make it a "
                "parameter of the module that is wrapped (one that has both the network and the loss), or wrap its "
                "module with weft.DistributedModel, too"
            )


def refuse_reading(optimizer: Optimizer) -> None:
    """Refuse an optimizer of PyTorch's that reads norms of shares, which FSDP2 gathers nowhere."""
    if isinstance(optimizer, Adafactor) and any(
        is_sharded(p) for g in optimizer.param_groups for p in g["params"]
    ):
        raise UsageError(
            "Adafactor reads norms of weights as numbers, which shares of FSDP2 do not have: write "
            '"sharded_data_parallel_degree": 1, share parameters inside a pipeline ("partitions" or '
            '"tensor_parallel_degree" above 1), or take AdamW, say'
        )


def is_part(parameter: Tensor) -> bool:
    """True if the parameter is a part of a larger one just now."""
    how = cut_of(parameter)
    return how is not None and how.shape != tuple(parameter.shape)


def setting_of_cuts() -> str:
    """The setting by which parameters are cut."""
    settings = current.session().settings
    degrees = ("sharded_data_parallel_degree", "expert_parallel_degree")
    return next((name for name in degrees if getattr(settings, name) > 1), "tensor_parallel_degree")


def refuse_norms(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would take a part of a weight for all of it."""
    if updates_parts_alike(optimizer):
        return
    name = type(optimizer).__name__
    why, advice = "updates a weight by the norm, or another measure, of all of it", "take AdamW, say"
    if wrapper_of(optimizer) is None:
        advice = (
            f"wrap it, optimizer = weft.DistributedOptimizer({name}(...)), which brings each weight to one rank for "
            "its update"
        )
    else:
        why = "updates several weights at once, by a norm or another measure of all of them"
    raise UsageError(
        f"{name} {why}, and ranks that split tensors or share parameters have parts: {advice}, or write "
        f'"{setting_of_cuts()}": 1'
    )


def refuse_several(optimizer: Optimizer, session: Session) -> None:
    """Refuse an optimizer that would take some weights for all of them."""
    if is_of_torch(optimizer) and updates_weights_alone(optimizer):
        return
    wrapped = wrapper_of(optimizer)
    weights: list[Any] = [weight for weight in weights_of(optimizer) if weight.requires_grad]
    remedy = None
    if len({weight._weft_owner for weight in weights}) > 1:
        remedy = '"partitions": 1'
    elif wrapped is not None and wrapped.shares is not None and len(weights) > 1:
        remedy = '"shard_optimizer_state": false'
    elif any(id(weight) in model.expert_ids for model in session.models for weight in weights):
        remedy = '"expert_parallel_degree": 1'
    if remedy is not None and looks_at_several(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} looks at several weights at once, by a norm of all of them, say, and each "
            "rank would see its own alone: take an optimizer that updates each weight for itself (AdamW, say), or "
            f"write {remedy}"
        )
