"""``DistributedOptimizer``: every rank updates what it owns; states gathered and scattered by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import UsageError
from weft.torch import state
from weft.torch.collective import gather_tensors
from weft.torch.recording import recorded

MASTERS, SCALE = "fp32_masters", "loss_scale"
"""Where states have the copies that an optimizer steps on, by the number of their parameter, and the loss scale."""


def _passed_on(name: str) -> property:
    """An attribute that belongs to the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        lambda self: delattr(self.optimizer, name),
    )


class DistributedOptimizer(Optimizer):
    """Wraps a ``torch.optim`` optimizer built from the model's parameters, before or after the partition.

    It is one itself for learning-rate schedulers; a scheduler made for the wrapped optimizer works too, because both
    share their parameter groups. Parameters of other ranks never have a gradient, so steps leave them alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"DistributedOptimizer wraps a torch.optim optimizer, once; it got a {type(optimizer).__qualname__}"
            )
        self.optimizer = optimizer
        for model in state.session().models:
            model.optimizer = self

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.__dict__["optimizer"], name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before the backward pass."""
        return 1.0

    # ``torch.amp.GradScaler`` leaves these two on a fused optimizer, for its kernels
    grad_scale = _passed_on("grad_scale")
    found_inf = _passed_on("found_inf")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__dict__.update(content)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's parameters from their gradients."""
        if closure is not None:
            raise UsageError(
                "DistributedOptimizer.step() takes no closure: compute the loss in a weft.step function"
            )
        with recorded(state.session(), "optimizer"):
            return self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget this rank's gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def forget_remote(self) -> None:
        """Drop what the optimizer holds for parameters of other ranks."""
        for parameter in list(self.optimizer.state):
            if isinstance(parameter, Tensor) and not is_local(parameter):
                del self.optimizer.state[parameter]

    # --- for optimizers that step on copies of the model's parameters ----------------------------------------

    def masters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter of this rank's part with the copy that stands for it in ``param_groups``; here none has."""
        return []

    def forget_masters(self) -> None:
        """The model's weights were loaded: copies follow them."""

    def scaling(self) -> dict[str, Any]:
        """The state of the loss scale, as plain values."""
        return {}

    def load_scaling(self, content: Mapping[str, Any]) -> None:
        """Take back what :meth:`scaling` gave."""

    # --- states ---------------------------------------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part: as ``torch.optim``'s, with the states of its own parameters only."""
        content = self.optimizer.state_dict()
        content["_smp_is_partial"] = state.session().pipeline is not None
        return content

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as a plain ``torch.optim`` optimizer would have it; collective over the pipeline."""
        content = self.optimizer.state_dict()
        session = state.session()
        if session.pipeline is None:
            return content
        with session.doing("the optimizer's state_dict()"):
            content["state"] = gather_states(session, content["state"])
        return content

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole state (or its own partial one); before or after the partition."""
        content = dict(state_dict)
        content.pop("_smp_is_partial", None)
        numbers = [p for group in self.optimizer.param_groups for p in group["params"]]
        entries = content.get("state", {})
        content["state"] = {
            number: entry for number, entry in entries.items() if is_local(numbers[int(number)])
        }
        self.optimizer.load_state_dict(content)


def gather_states(
    session: state.Session, entries: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """What all ranks of the pipeline hold for parameters, by their number; collective over the pipeline."""
    tensors = {}
    plain = {}
    for number, entry in entries.items():
        for name, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{number}/{name}"] = value
            else:
                plain[f"{number}/{name}"] = value
    everything = gather_tensors(tensors, plain, session.group("pp"), session.peers("pp"))
    merged: dict[int, dict[str, Any]] = {}
    for path, value in everything.items():
        number_text, _, name = path.partition("/")
        merged.setdefault(int(number_text), {})[name] = value
    return {number: merged[number] for number in sorted(merged)}


def is_local(parameter: Tensor) -> bool:
    """Whether this rank owns a parameter (every rank does before the partition)."""
    owner = parameter._weft_owner  # type: ignore[attr-defined]
    pipeline = state.session().pipeline
    return owner is None or pipeline is None or owner == pipeline.rank


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over all ranks of the pipeline is at most ``max_norm``.

    Returns the norm before, the same on every rank; collective over the pipeline. A shared parameter counts once: it
    has one owner. As in ``torch.nn.utils.clip_grad_norm_``, gradients are multiplied by
    ``min(1, max_norm / (norm + 1e-6))``.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    unique = {id(p): p for p in parameters if p.grad is not None and is_local(p)}
    grads = [p.grad for p in unique.values() if p.grad is not None]
    session = state.session()
    norm_type = float(norm_type)
    local = torch.nn.utils.get_total_norm(grads, norm_type) if grads else torch.zeros(())
    if session.pipeline is None:
        total = local
    else:
        shared = local.detach().double().cpu()
        with session.doing("clip_grad_norm_()"):
            if norm_type == float("inf"):
                dist.all_reduce(shared, dist.ReduceOp.MAX, group=session.group("pp"))
            else:
                shared = shared**norm_type
                dist.all_reduce(shared, group=session.group("pp"))
                shared = shared ** (1.0 / norm_type)
        total = shared.to(local.dtype if grads else torch.float32)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of the gradients over all ranks is {total.item()}, so they cannot be clipped"
        )
    if grads:
        torch.nn.utils.clip_grads_with_norm_(list(unique.values()), max_norm, total.to(grads[0].device))
    return total
