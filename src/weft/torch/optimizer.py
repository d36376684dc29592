"""``DistributedOptimizer``: every rank updates what it owns; states gathered and scattered by parameter."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from weft.errors import UsageError
from weft.session.recording import record_outermost
from weft.torch.clip import is_local
from weft.torch.offload.states import OffloadedStates
from weft.torch.optimizer_steps import (
    host_weights_of,
    on_device,
    parameters_of,
    refuse_outsiders,
    refuse_reading,
    refuse_several,
    setting_of_cuts,
)
from weft.torch.replicas.full_tensors import full_tensor, is_sharded, like
from weft.torch.replicas.optimizer_trials import (
    updates_parts_alike,
    updates_weights_alone,
)
from weft.torch.replicas.reducer import without_gradients
from weft.torch.replicas.sharded_optimizer import Shares, by_parameter, tensors_and_plain
from weft.torch.session import current
from weft.torch.session.collectives import gather_tensors
from weft.torch.tensor_parallel import axes_of, can_cut, cut, is_cut
from weft.torch.tensors.marks import WRAPPED

if TYPE_CHECKING:
    from weft.torch.replicas.sharding.local_steps import LocalSteps
    from weft.torch.replicas.whole_updates import WholeUpdates

SHARE = "_weft_share"
"""Beside a replica's own part of a shared state: which replica's, of how many."""

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
    An optimizer that looks at several weights at once (Prodigy, LBFGS) is a UsageError at its first step if ranks have
    different ones.
    """

    takes_whole = True
    """Whether it can have the states of the whole model before the split."""

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"DistributedOptimizer wraps a torch.optim optimizer, once; it got a {type(optimizer).__qualname__}"
            )
        if "_optimizer_step_pre_hooks" not in vars(optimizer):
            name = type(optimizer).__qualname__
            raise UsageError(
                f"{name} does not call Optimizer.__init__(), so DistributedOptimizer cannot wrap it: wrap the "
                f"optimizer inside of it, {name}(weft.DistributedOptimizer(...))"
            )
        sharded = [model for model in current.session().models if model.sharded]
        known = {id(parameter) for model in sharded for _, parameter in model.reduced_parameters()}
        if sharded and not all(is_sharded(p) or id(p) in known for p in parameters_of(optimizer)):
            raise UsageError(
                "the optimizer has parameters from before they were sharded: build it from model.parameters() after "
                "model = DistributedModel(...)"
            )
        refuse_reading(optimizer)
        self.optimizer = optimizer
        self._shares: Shares | None = None
        self._whole_updates: WholeUpdates | None = None
        self._offloaded: OffloadedStates | None = None
        current.session().agreement.add_optimizer(self)
        setattr(optimizer, WRAPPED, self)
        for model in current.session().models:
            model.add_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        found = getattr(self.__dict__["optimizer"], name)
        return partial(self._switch, found) if name in ("train", "eval") else found

    def _switch(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a method by which an optimizer (schedule-free) brings other weights for training or evaluation;
        collective over the replicas if they share states, without which they have the old ones."""
        result = method(*args, **kwargs)
        if self.shares is not None:
            self._exchange(self.shares)
        return result

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
        """The factor of losses before the backward pass."""
        return 1.0

    @property
    def pending_scale(self) -> float | None:
        """The loss scale of the gradients that wait for this optimizer's step; None without any."""
        return None

    def use_loss_scale(self, scale: float) -> None:
        """A backward pass begins with this scale, which all optimizers of the model have in common.

        Raises:
            UsageError: This optimizer does not divide its gradients by a scale, or has gradients of another one.
        """
        if scale != self.loss_scale:
            raise UsageError(
                f"the model has an optimizer whose losses are scaled (by {scale:g}) and this "
                f"{type(self.optimizer).__name__}, which does not divide its gradients by that: wrap both alike"
            )

    # ``torch.amp.GradScaler`` leaves these two on a fused optimizer, for its kernels
    grad_scale = _passed_on("grad_scale")
    found_inf = _passed_on("found_inf")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__dict__.update(content, _shares=None, _whole_updates=None, _offloaded=None)

    @property
    def shares(self) -> Shares | None:
        """The parameters that each replica updates, with ``shard_optimizer_state``; None before the partition."""
        session = current.session()
        if self._shares is None:
            if not session.settings.shard_optimizer_state or session.mesh.rdp == 1:
                return None
            given = {id(parameter) for parameter in self.weights()}
            models = [m for m in session.models if any(id(p) in given for p in m.module.parameters())]
            if not models or not all(model.partitioned and model.reducer is not None for model in models):
                return None
            self._shares = Shares(models[0].reducer.group, session.position("rdp"), session.mesh.rdp)
            self.forget_remote()  # some optimizers make all states at once
        parameters = self.weights()
        experts = {each for model in session.models for each in model.expert_ids}
        self._shares.extend(parameters, [is_local(parameter) for parameter in parameters], experts)
        return self._shares

    def weights(self) -> list[Tensor]:
        """The model's parameters by their numbers in the optimizer."""
        return parameters_of(self.optimizer)

    @property
    def whole_updates(self) -> WholeUpdates | None:
        """The updates of parameters that are cut, where the optimizer looks at whole ones; None where none is cut."""
        weights = {number: each for number, each in enumerate(self.stepped_on()) if is_local(each[0])}
        if self._whole_updates is None:
            if not any(is_cut(weight) for weight, _ in weights.values()) or not self._takes_whole_weights:
                return None
            from weft.torch.replicas.whole_updates import WholeUpdates  # here: few optimizers need it

            self._whole_updates = WholeUpdates(self.optimizer)
        shares = self.shares
        apart = {} if shares is None else {number: shares.replica_of(number) for number in weights}
        if self._whole_updates.extend(weights, apart):
            self.forget_remote()
        return self._whole_updates

    @cached_property
    def _takes_whole_weights(self) -> bool:
        """True if the wrapped optimizer is given whole weights, where ranks have parts."""
        from weft.torch.replicas.whole_updates import can_update_whole  # here: few optimizers need it

        return can_update_whole(self.optimizer)

    def held(self) -> list[bool]:
        """For each parameter by its number whether this rank takes part in its update."""
        shares = self.shares
        local = [is_local(parameter) for parameter in self.weights()]
        return [here and (shares is None or shares.has(number)) for number, here in enumerate(local)]

    def mine(self) -> list[bool]:
        """For each parameter by its number whether this rank updates it, and keeps its state."""
        whole = self.whole_updates
        return [held and (whole is None or whole.has(number)) for number, held in enumerate(self.held())]

    @property
    def whole_states(self) -> Container[int]:
        """The numbers of the parameters of which one of the ranks that hold them has all of the state."""
        return self.whole_updates or ()

    def saved(self, parts: bool = False) -> list[bool]:
        """For each parameter by its number whether this rank saves its state, of all that have it. ``parts``: the same
        for what ranks have the same parts of as of the parameter."""
        session = current.session()
        context, part = session.tensor.places
        replica, degree = session.position("rdp"), session.settings.replica_shards

        whole, shares = () if parts else self.whole_states, self.shares

        def first(number: int, weight: Tensor) -> bool:
            axes = axes_of(weight) if number in whole else set[str]()
            parts = "rdp" in axes_of(weight) and number not in whole  # gathered, on the first
            here = (shares is not None and not parts) or not replica or ("rdp" in axes and replica < degree)
            return here and not context and (not part or "tp" in axes)

        return [
            kept and first(number, weight)
            for number, (kept, weight) in enumerate(
                zip(self.held() if parts else self.mine(), self.weights(), strict=True)
            )
        ]

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's parameters from their gradients; collective over the replicas if they share states.

        ``closure``: called once, before the update, to compute the gradients; what it gives is returned.
        """
        session = current.session()
        session.check_outside("the optimizer's step()")
        if closure is not None:
            if isinstance(self.optimizer, LBFGS):
                raise UsageError(
                    "LBFGS looks at all parameters at once, and a rank has only its own: choose an optimizer that "
                    "updates each parameter for itself"
                )
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        if session.rehearsal is not None:
            return session.rehearsal.update(self.optimizer)
        for model in session.models:
            if model.reducer is not None:
                model.reducer.refuse_unseen()
        refuse_outsiders(self.optimizer, session)
        refuse_several(self.optimizer, session)
        shares = self.shares
        with record_outermost(session, "optimizer"):
            weights = self.weights()
            with session.agreement.stepping(weights):
                if shares is None:
                    with on_device(session, weights):
                        return self._update()
                others = [weight for weight, held in zip(weights, self.held(), strict=True) if not held]
                with on_device(session, weights), without_gradients(others):
                    result = self._update()
                self._exchange(shares)
                return result

    def _exchange(self, shares: Shares) -> None:
        """Bring each replica's weights to the others; collective over the replicas."""
        session, weights = current.session(), self.weights()
        with session.doing("the optimizer's step"), on_device(session, weights, values=True):
            shares.exchange({n: w for n, w in enumerate(weights) if w.requires_grad and is_local(w)})

    def _update(self) -> Any:
        by_buckets, whole = self.offloaded or self._weights_by_buckets, self.whole_updates
        update = self.optimizer.step if by_buckets is None else by_buckets.step
        if by_buckets is None and any(map(is_sharded, parameters_of(self.optimizer))):
            return self._update_sharded()
        if whole is None:
            with nullcontext() if by_buckets is not None else self._held_alone():
                return update()
        session = current.session()
        with session.doing("the optimizer's step"), on_device(session, self.weights(), values=True):
            return whole.step(update, setting_of_cuts())

    @contextmanager
    def _held_alone(self) -> Iterator[None]:
        """Inside, the wrapped optimizer's groups have the parameters alone that this rank updates.

        Some optimizers update those without a gradient, too, as if it were zero (Muon's script).
        """
        groups, held = self.optimizer.param_groups, self.held()
        everything, here = [group["params"] for group in groups], iter(held)
        for group, parameters in zip(groups, everything, strict=True) if not all(held) else ():
            group["params"] = [each for each in parameters if next(here)]
        try:
            yield
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters

    def _update_sharded(self) -> Any:
        """An update of DTensors."""
        if updates_parts_alike(self.optimizer):
            return self._local_steps.step()
        try:
            return self.optimizer.step()
        except (UsageError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            name, why = type(self.optimizer).__name__, str(error).strip().partition("\n")[0]
            raise UsageError(
                f"{name} looks at whole weights, and PyTorch cannot do that with DTensors (FSDP2): "
                f'{type(error).__name__}, {why}. Write "sharded_data_parallel_degree": 1, share parameters inside a '
                'pipeline ("partitions" or "tensor_parallel_degree" above 1), which brings it whole weights, or take '
                "AdamW, say"
            ) from error

    @cached_property
    def _local_steps(self) -> LocalSteps:
        from weft.torch.replicas.sharding.local_steps import LocalSteps  # here: few jobs have DTensors

        return LocalSteps(self.optimizer)

    @property
    def offloaded(self) -> OffloadedStates | None:
        """The states as they wait outside of the device; None without ``offload_optimizer``.

        Raises:
            UsageError: The optimizer cannot update some parameters after the others.
        """
        session = current.session()
        if self._offloaded is None and session.settings.offload_optimizer and session.rehearsal is None:
            if not updates_weights_alone(self.optimizer):
                raise UsageError(
                    f"{type(self.optimizer).__name__} looks at several parameters at once, and offload_optimizer "
                    'updates some after the others: write "offload_optimizer": false, or take an optimizer that '
                    "updates each parameter for itself (AdamW, say)"
                )
            self._offloaded = OffloadedStates(self.optimizer, session.device)
        return self._offloaded

    @property
    def _weights_by_buckets(self) -> OffloadedStates | None:
        """Brings offloaded weights to the device bucket by bucket, where an optimizer can update some after others."""
        session = current.session()
        if not any(host_weights_of(session)) or not updates_weights_alone(self.optimizer):
            return None
        return OffloadedStates(self.optimizer, session.device, setting="offload_weights")

    def _give_state(self, content: Mapping[str, Any]) -> None:
        """Give a state to the wrapped optimizer."""
        offloaded = self.offloaded
        with on_device(current.session(), self.weights()):  # where PyTorch brings the states
            if offloaded is None:
                self.optimizer.load_state_dict(dict(content))
            else:
                offloaded.load(content)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget this rank's gradients."""
        current.session().check_outside("the optimizer's zero_grad()")
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def forget_remote(self) -> None:
        """Drop what the optimizer holds for parameters that this rank does not update."""
        present = [p for group in self.optimizer.param_groups for p in group["params"]]
        for parameter, mine in zip(present, self.mine(), strict=True):
            if not mine and parameter in self.optimizer.state:
                del self.optimizer.state[parameter]

    def take_over(self, weight: Tensor, entry: dict[str, Any]) -> None:
        """Keep this for a parameter that this rank updates from now on."""
        self.optimizer.state[weight] = entry
        if self.offloaded is not None:
            self.offloaded.put_away([weight])

    def stepped_on(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter of the model with the tensor that the wrapped optimizer steps on: the same one here."""
        return [(weight, weight) for weight in self.weights()]

    def follow_cuts(self) -> None:
        """Parameters were cut over ranks: keep the same parts of what the optimizer holds for them, or all of it if
        this rank updates the whole."""
        whole = self.whole_states
        for number, (weight, stepped) in enumerate(self.stepped_on()):
            with torch.no_grad():
                if can_cut(stepped, weight):
                    stepped.data = cut(stepped.data, weight)
                if number in whole:
                    continue
                for key, value in self.optimizer.state.get(stepped, {}).items():
                    if isinstance(value, Tensor) and can_cut(value, weight):
                        self.optimizer.state[stepped][key] = cut(value, weight)

    def forget_masters(self) -> None:
        """The model's weights were loaded: copies that an optimizer steps on instead follow them. Here are none."""

    # --- states ---------------------------------------------------------------------------------------------

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part: as ``torch.optim``'s, with the states of its own parameters only.

        If replicas share states, it has those of all replicas, which all call it; with ``gather_if_shard=False`` those
        of this rank alone, and a key that says whose they are.
        """
        over = {"rdp"} if self.shares is not None and gather_if_shard else set[str]()
        over |= self._state_axes()
        content = self._with_states("stage" if len(over) > 1 else next(iter(over), None))
        content["_smp_is_partial"] = current.session().pipeline is not None
        if self.shares is not None and not gather_if_shard:
            content[SHARE] = [self.shares.replica, self.shares.replicas]
        return content

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as a plain ``torch.optim`` optimizer would have it; collective over the pipeline, and over
        all ranks if replicas share states."""
        if self.shares is not None or "rdp" in self._state_axes():
            return self._with_states("world")
        if current.session().pipeline is None:
            return self._with_states(None)
        return self._with_states("mp" if self._state_axes() else "pp")

    def _state_axes(self) -> set[str]:
        """The axes of the mesh over which ranks have the whole states of different parameters."""
        session = current.session()
        settings = session.settings
        if session.pipeline is None or not self._takes_whole_weights:
            return set()
        degrees = {"tp": settings.tensor_parallel_degree, "rdp": settings.replica_shards}
        return {axis for axis, degree in degrees.items() if degree > 1}

    def _with_states(self, axis: str | None) -> dict[str, Any]:
        """The wrapped optimizer's ``state_dict()``, with the states of all ranks along an axis, if there is one."""
        content = self.optimizer.state_dict()
        content["state"] = self._gathered(content["state"], axis)
        return content

    def own_state(self) -> tuple[dict[str, Any], Any]:
        """The wrapped optimizer's state on this rank, for checkpoints; and what else has to be saved, as JSON."""
        return self.optimizer.state_dict(), None

    def load_own_state(self, content: dict[str, Any], more: Any) -> None:
        """Take back what :meth:`own_state` gave."""
        self._give_state(content)

    def _gathered(self, entries: dict[Any, dict[str, Any]], axis: str | None) -> dict[Any, dict[str, Any]]:
        """States by parameter, from all ranks along an axis; those of this rank without one."""
        session = current.session()
        if any(model.sharded or model.cut for model in session.models):
            weights, whole = self.weights(), self.whole_states
            with session.doing("the optimizer's state_dict()"):
                entries = {
                    n: {
                        key: full_tensor(v, weights[n])
                        if isinstance(v, Tensor) and (key == MASTERS or n not in whole)
                        else v
                        for key, v in entry.items()
                    }
                    for n, entry in entries.items()
                }
        if axis is None:
            return entries
        with session.doing("the optimizer's state_dict()"):
            return by_parameter(
                gather_tensors(*tensors_and_plain(entries), session.group(axis), session.peers(axis))
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole state (or its own partial one); before or after the partition."""
        content = dict(state_dict)
        content.pop("_smp_is_partial", None)
        session = current.session()
        share, here = content.pop(SHARE, None), [session.position("rdp"), session.mesh.rdp]
        if share is not None and (list(share) != here or not session.settings.shard_optimizer_state):
            raise UsageError(
                f"this is the state of replica {share[0]} of {share[1]} that shared it, for replica {here[0]} of "
                f"{here[1]}: set shard_optimizer_state and start {share[1]} replicas, or save with gather_if_shard=True"
            )
        mine, weights, whole = self.mine(), self.weights(), self.whole_states
        content["state"] = {
            n: entry
            if int(n) in whole
            else {key: like(value, weights[int(n)]) for key, value in entry.items()}
            for n, entry in content.get("state", {}).items()
            if mine[int(n)]
        }
        self._give_state(content)
