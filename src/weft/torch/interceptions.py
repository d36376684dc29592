"""Replacements of functions of PyTorch, and hooks of optimizers' steps: put in place once, for the process."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weft.errors import UsageError, warn
from weft.torch import clip
from weft.torch.execution import entry_points
from weft.torch.optimizer import DistributedOptimizer
from weft.torch.optimizer_steps import (
    host_weights_of,
    is_part,
    parameters_of,
    refuse_norms,
    refuse_outsiders,
    refuse_several,
    wrapper_of,
)
from weft.torch.pytorch import lost_arguments
from weft.torch.replicas.sync_batch_norm import without_counting_again
from weft.torch.session import current
from weft.torch.session.session import Session


def install() -> None:
    """Put the interceptions in place; a second call changes nothing."""
    if entry_points.install((*clip.REPLACED, *lost_arguments.REPLACED), without_counting_again):
        _look_at_steps()
        _bring_weights_for_steps()


def _look_at_steps() -> None:
    """Look at each optimizer's step before it begins: refuse one that would be wrong, warn of one that does nothing."""
    idle: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    plain: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not current.is_initialized():
            return
        session, parameters = current.session(), parameters_of(optimizer)
        if session.in_step:
            own = {id(parameter) for model in session.models for parameter in model.parameters()}
            if any(id(parameter) in own for parameter in parameters):
                session.check_outside("the optimizer's step()")
        if (session.mesh.tp > 1 or session.settings.replica_shards > 1) and any(
            is_part(parameter) and parameter.grad is not None for parameter in parameters
        ):
            refuse_norms(optimizer)
        is_plain = not isinstance(optimizer, DistributedOptimizer) and wrapper_of(optimizer) is None
        if is_plain:
            refuse_outsiders(optimizer, session)
            refuse_several(optimizer, session)
        if optimizer not in idle and _trains_nothing(session, parameters):
            idle.add(optimizer)
            warn(
                f"{type(optimizer).__name__}.step() trains nothing: no step has had a backward pass, so there are no "
                "gradients. Call model.backward(loss) in the function that @weft.step decorates"
            )
        if is_plain and optimizer not in plain and _is_of_split_model(session, parameters):
            _warn_of_plain(optimizer, session)
            plain.add(optimizer)

    register_optimizer_step_pre_hook(look)


def _trains_nothing(session: Session, parameters: list[Tensor]) -> bool:
    """True if the steps so far have computed no gradients for these parameters, as the first rank sees it."""
    if session.rank or not session.steps or session.went_backward:
        return False
    return all(parameter.grad is None for parameter in parameters)


def _is_of_split_model(session: Session, parameters: list[Tensor]) -> bool:
    return session.pipeline is not None and any(
        parameter._weft_owner is not None  # type: ignore[attr-defined]
        for parameter in parameters
    )


def _warn_of_plain(optimizer: Optimizer, session: Session) -> None:
    """Warn a script that forgot the wrapper, once; refuse it where parameters move to other ranks."""
    name = type(optimizer).__name__
    if session.settings.rebalance:
        raise UsageError(
            f"rebalance moves parameters to other ranks, but this {name} is not wrapped, and what it keeps for them "
            f'would stay: write optimizer = weft.DistributedOptimizer({name}(...)), or "rebalance": false'
        )
    if session.rank == 0:
        warn(
            f"this {name} steps on a split model and is not wrapped, so its state_dict() has the states of this rank "
            f"only, and checkpoints have none: write optimizer = weft.DistributedOptimizer({name}(...))"
        )


def _bring_weights_for_steps() -> None:
    """Let the step of any optimizer find offloaded weights on the device, if they have gradients."""

    def updated(optimizer: Optimizer) -> list[Tensor]:
        if isinstance(optimizer, DistributedOptimizer):
            return []
        return [p for p in parameters_of(optimizer) if p.grad is not None]

    def bring(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for each in host_weights_of(current.session()) if current.is_initialized() else ():
            each.bring(updated(optimizer))

    def take_back(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for each in host_weights_of(current.session()) if current.is_initialized() else ():
            each.take_back(updated(optimizer))

    register_optimizer_step_pre_hook(bring)
    register_optimizer_step_post_hook(take_back)
