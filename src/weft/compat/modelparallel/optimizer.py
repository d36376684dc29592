"""``smp.DistributedOptimizer``: weft's, and with ``fp16`` or ``bf16`` one that steps on 32-bit copies.

The weights that the model computes with have 16 bits. Each rank keeps a 32-bit *master* of each of its own, updates
that, and rounds it into the model, as in Micikevicius et al., Mixed Precision Training (arXiv 1710.03740), section 3.
With ``fp16`` the loss is multiplied by a scale before the backward pass and gradients are divided by it; a step whose
gradients are not finite on any rank of the pipeline is left out on all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.compat.dataparallel import ds_names
from weft.compat.modelparallel.loss_scale import LossScale
from weft.compat.modelparallel.session import state
from weft.errors import UsageError
from weft.torch import optimizer as weft_optimizer
from weft.torch.checkpoint.landing import Arrival
from weft.torch.clip import clip_along, clip_grad_norm_, counted_once, is_local
from weft.torch.optimizer import MASTERS, SCALE
from weft.torch.replicas.full_tensors import like, share_of
from weft.torch.session import current as session_of
from weft.torch.session.collectives import gather_texts


def _finite(grad: Tensor) -> bool:
    return bool(torch.isfinite(share_of(grad)).all())


class DistributedOptimizer(weft_optimizer.DistributedOptimizer):
    """Wraps a ``torch.optim`` optimizer of the model's parameters.

    ``static_loss_scale``: what the loss is multiplied by with ``fp16``; ``dynamic_loss_scale``: find it, see
    :class:`LossScale`, whose arguments may be given as keywords or in a dict ``dynamic_loss_args``. Without ``fp16``
    and ``bf16`` these change nothing.
    """

    _is_accelerate_prepared = True
    """Makes Hugging Face's accelerate leave this optimizer as it is: its own wrapper hides ``local_state_dict``."""

    def __new__(cls, optimizer: Any, *args: Any, **kwargs: Any) -> DistributedOptimizer:
        if cls is DistributedOptimizer and (state.cfg.fp16 or state.cfg.bf16):
            cls = MasterOptimizer
        return object.__new__(cls)

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **more_loss_args: Any,
    ) -> None:
        super().__init__(optimizer)
        arguments = {**(dynamic_loss_args or {}), **more_loss_args}
        scales = bool(state.cfg.fp16)
        self.loss_scaler = LossScale.of(scales, static_loss_scale, dynamic_loss_scale, arguments)
        self.overflow = False
        if state.cfg.sharded_data_parallel_degree > 1:
            self._global_grad_norm: Any = None
            """Of the last step's gradients before they were clipped; -1 if that step overflowed."""

    def __getattr__(self, name: str) -> Any:
        if name == "_global_grad_norm":
            raise AttributeError(
                "the optimizer has no _global_grad_norm: it is there with sharded_data_parallel_degree above 1, where "
                "step() clips; else torch.nn.utils.clip_grad_norm_(model.parameters(), ...) returns the norm"
            )
        return super().__getattr__(name)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before the backward pass."""
        return self.loss_scaler.loss_scale

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was left out, under the name that accelerate asks for."""
        return self.overflow

    @property
    def fp16_groups(self) -> Sequence[Sequence[Tensor]]:
        """The model's parameters, by group."""
        return [list(group["params"]) for group in self.optimizer.param_groups]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """For each group a copy of this rank's shares in fp32, one after the other."""
        return ds_names.flat(self.param_groups)

    @property
    def ds_param_shard_group(self) -> Any:
        """The process group whose ranks share parameters; None if they share none."""
        return ds_names.group_of(self.param_groups)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part of the state, with the key ``_smp_is_partial``."""
        content = super().local_state_dict(gather_if_shard)
        content["_smp_is_partial"] = True
        return content

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """As :meth:`local_state_dict`."""
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any]) -> None:
        """As :meth:`load_state_dict`."""
        self.load_state_dict(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole state, or of the partial ones of all ranks of the pipeline.

        Every rank of the pipeline calls it: what another rank has saved of this rank's part, because the model was
        split otherwise, is sent. Before the partition settings are taken at once, and the rest right after it.
        """
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise UsageError(
                f"the state has {len(saved_groups)} groups of parameters, the optimizer has {len(self.param_groups)}: "
                "build the optimizer as the script that saved it did"
            )
        model = self._waits_for()
        if model is not None:
            for group, saved in zip(self.param_groups, saved_groups, strict=True):
                group.update({name: value for name, value in saved.items() if name != "params"})
            Arrival(model, self, lambda: self.load_state_dict(state_dict), whole=False)
            return
        content = dict(state_dict)
        if content.get("_smp_is_partial"):
            content |= self._merge(content)
        self._load(content)

    def _load(self, content: Mapping[str, Any]) -> None:
        super().load_state_dict(content)

    def _waits_for(self) -> Any:
        """The model that has no partition yet, so that nobody knows which parameters are this rank's."""
        models = (model for model in session_of.session().models if self in model.optimizers)
        return next((model for model in models if not model.partitioned), None)

    def _merge(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The states and masters of all ranks, if some rank lacks what another one has; else those of this rank."""
        session = session_of.session()
        states, masters = content["state"], content.get(MASTERS, {})
        if session.pipeline is None:
            return {}
        parameters = [p for group in self.param_groups for p in group["params"]]
        needs = [number for number, parameter in enumerate(parameters) if is_local(parameter)]
        held = sorted({*states, *masters})
        with session.doing("the optimizer's load_state_dict()"):
            texts = gather_texts(json.dumps([held, needs]), session.group("pp"))
            numbers = [json.loads(text) for text in texts]
            saved = {number for has, _ in numbers for number in has}
            if all(saved.intersection(wants) <= set(has) for has, wants in numbers):
                return {}
            copies = {number: {MASTERS: master} for number, master in masters.items()}
            everything = self._gathered({n: states.get(n, {}) | copies.get(n, {}) for n in held}, "pp")
        masters = {n: entry.pop(MASTERS) for n, entry in everything.items() if MASTERS in entry}
        return {MASTERS: masters, "state": {n: entry for n, entry in everything.items() if entry}}

    def _update(self) -> Any:
        if state.cfg.sharded_data_parallel_degree > 1:  # as the original does, always
            stepped = [p for group in self.param_groups for p in group["params"]]
            if session_of.session().pipeline is None:
                norm = clip_along(None, stepped, state.cfg.sdp_gradient_clipping)
            else:
                norm = clip_grad_norm_(stepped, state.cfg.sdp_gradient_clipping)
            self._global_grad_norm = norm
        return super()._update()

    def orig_state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer, as it is on this rank."""
        return self.optimizer.state_dict()

    def clip_master_grads(self, max_norm: float) -> Any:
        """Scale this pipeline's gradients so that their norm is at most ``max_norm``; returns the norm before."""
        return clip_grad_norm_([p for group in self.param_groups for p in group["params"]], max_norm)


class MasterOptimizer(DistributedOptimizer):
    """The same, with 32-bit masters; see the module. ``param_groups`` hold the masters from the first step on."""

    takes_whole = False  # masters are of the parameters that this rank updates

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        super().__init__(*args, **kwargs)
        self._ready = False
        self._scale: float | None = None

    @property
    def loss_scale(self) -> float:
        """The factor of the loss: the same from the first backward pass to the step, even if a state is loaded between
        them, as Hugging Face's Trainer does."""
        if self._scale is None:
            self._scale = self.loss_scaler.loss_scale
        return self._scale

    @property
    def pending_scale(self) -> float | None:
        """The loss scale of the gradients that wait for this optimizer's step; None without any."""
        return self._scale

    def use_loss_scale(self, scale: float) -> None:
        """A backward pass begins with this scale."""
        if self._scale not in (None, scale):
            raise UsageError(
                f"gradients of two optimizers of the model have different loss scales, {self._scale:g} and {scale:g}: "
                "call step() or zero_grad() of both after the same backward passes"
            )
        self._scale = scale

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The 16-bit parameters that this rank updates, in one group."""
        return [[low for low, _ in self.masters()]]

    def masters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each 16-bit parameter that this rank updates, with its master; made from their values at the first use after
        the partition. Before it there are none."""
        if not self._pairs and self._waits_for() is None:
            held = iter(self.held())
            for group in self.optimizer.param_groups:
                for at, low in enumerate(group["params"]):
                    if next(held) and low.dtype in (torch.float16, torch.bfloat16):
                        master = nn.Parameter(low.detach().float().clone(), requires_grad=low.requires_grad)
                        master._weft_owner = low._weft_owner  # type: ignore[attr-defined]
                        master._weft_cut = low._weft_cut  # type: ignore[attr-defined]
                        group["params"][at] = master
                        self._pairs.append((low, master))
                        if low in self.optimizer.state:
                            self.optimizer.state[master] = self.optimizer.state.pop(low)
        return self._pairs

    def weights(self) -> list[Tensor]:
        """The model's parameters by their numbers in the optimizer."""
        lows = {id(master): low for low, master in self._pairs}
        return [lows.get(id(p), p) for p in super().weights()]

    def stepped_on(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter of the model with its master, or with itself if it has none."""
        masters = {id(low): master for low, master in self._pairs}
        return [(weight, masters.get(id(weight), weight)) for weight in self.weights()]

    def follow_cuts(self) -> None:
        """Parameters were cut over ranks: keep the same parts of masters and states."""
        super().follow_cuts()
        for low, master in self._pairs:
            master._weft_cut = low._weft_cut  # type: ignore[attr-defined]

    def forget_remote(self) -> None:
        """Drop what this rank holds for parameters that it does not update."""
        super().forget_remote()
        kept, held = [], iter(self.held())
        pairs = {id(master): (low, master) for low, master in self._pairs}
        for group in self.optimizer.param_groups:
            for at, parameter in enumerate(group["params"]):
                pair, keep = pairs.get(id(parameter)), next(held)
                if pair is not None and keep:
                    kept.append(pair)
                elif pair is not None:
                    group["params"][at] = pair[0]
        self._pairs = kept

    def forget_masters(self) -> None:
        """The model's weights were loaded: masters follow them."""
        with torch.no_grad():
            for low, master in self._pairs:
                master.copy_(low)

    def _unscale(self) -> None:
        """Gradients into the masters, divided by the scale; notices on every rank of the pipeline if some are not
        finite."""
        if self._ready:
            return
        pairs = self.masters()
        bad = torch.zeros(())
        for low, master in pairs:
            master.grad = None if low.grad is None else low.grad.float() / self.loss_scale
            if master.grad is not None and not _finite(master.grad):
                bad.fill_(1.0)
        masters = {id(master) for _, master in pairs}
        for group in self.optimizer.param_groups:
            for other in group["params"]:
                if id(other) not in masters and is_local(other) and other.grad is not None:
                    other.grad.div_(self.loss_scale)
                    if not _finite(other.grad):
                        bad.fill_(1.0)
        session = session_of.session()
        axis = "world" if any(model.sharded or model.shared for model in session.models) else "mp"
        if axis == "world" or session.pipeline is not None:
            with session.doing("the check for overflow"):
                dist.all_reduce(bad, dist.ReduceOp.MAX, group=session.group(axis))
        self.overflow = bool(bad)
        self._ready = True

    def clip_master_grads(self, max_norm: float) -> Any:
        """Scale the masters' gradients so that their norm over the pipeline is at most ``max_norm``.

        Returns the norm before, or -1 if this step overflows. Every rank calls it, before ``step``.
        """
        self._unscale()
        if self.overflow:
            return -1.0
        if self.shares is None:
            return super().clip_master_grads(max_norm)
        stepped = (p for group in self.param_groups for p in group["params"])
        held = list(compress(stepped, self.held()))
        return clip_along("world", held, max_norm, counted=counted_once(session_of.session(), held))

    def step(self, closure: Any = None) -> Any:
        """Update the masters and round them into the model, unless gradients overflowed."""
        self._unscale()
        self._ready, self._scale = False, None
        self.loss_scaler.update(self.overflow)
        if self.overflow:
            if state.cfg.sharded_data_parallel_degree > 1:
                self._global_grad_norm = torch.tensor(-1.0)
            return None
        return super().step(closure)

    def _update(self) -> Any:
        result = super()._update()
        with torch.no_grad():
            for low, master in self._pairs:
                low.copy_(master)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget this rank's gradients, of the model and of the masters."""
        super().zero_grad(set_to_none)
        for low, _ in self._pairs:
            if set_to_none:
                low.grad = None
            elif low.grad is not None:
                low.grad.zero_()
        self._ready, self._scale = False, None

    def _with_states(self, axis: str | None) -> dict[str, Any]:
        """With the masters of the same ranks, and the loss scale."""
        self.masters()
        content = super()._with_states(axis)
        masters = {n: {MASTERS: master.detach()} for n, master in self._by_number().items()}
        content[MASTERS] = {n: entry[MASTERS] for n, entry in self._gathered(masters, axis).items()}
        content[SCALE] = self.loss_scaler.state_dict()
        return content

    def own_state(self) -> tuple[dict[str, Any], Any]:
        """The wrapped optimizer's state on this rank with the masters in it, and the loss scale."""
        self.masters()
        content, _ = super().own_state()
        for number, master in self._by_number().items():
            content["state"][number] = {**content["state"].get(number, {}), MASTERS: master.detach()}
        return content, self.loss_scaler.state_dict()

    def load_own_state(self, content: dict[str, Any], more: Any) -> None:
        """Take back what :meth:`own_state` gave; without masters they follow the model's weights."""
        self.masters()
        masters = {number: entry.pop(MASTERS, None) for number, entry in content["state"].items()}
        content["state"] = {number: entry for number, entry in content["state"].items() if entry}
        super().load_own_state(content, more)
        self.forget_masters()
        self._take_masters(masters)
        if more is not None:
            self.loss_scaler.load_state_dict(more)

    def _take_masters(self, masters: Mapping[int, Any]) -> None:
        weights = self.weights()
        with torch.no_grad():
            for number, master in self._by_number().items():
                value = masters.get(number)
                if isinstance(value, Tensor):
                    master.copy_(like(value, master))
                    weights[number].copy_(master)

    def _by_number(self) -> dict[int, nn.Parameter]:
        """This rank's masters by their numbers in the optimizer."""
        masters = {id(master): master for _, master in self._pairs}
        flat = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {number: masters[id(p)] for number, p in enumerate(flat) if id(p) in masters}

    def _load(self, content: Mapping[str, Any]) -> None:
        """Load a state, and the masters and the loss scale if they are in it."""
        content = dict(content)
        masters, scale = content.pop(MASTERS, {}), content.pop(SCALE, None)
        self.masters()
        super()._load(content)
        self._take_masters(masters)
        if scale is not None:
            self.loss_scaler.load_state_dict(scale)
