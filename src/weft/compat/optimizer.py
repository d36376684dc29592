"""``smp.DistributedOptimizer``: weft's, and with ``fp16`` or ``bf16`` one that steps on 32-bit copies.

The weights that the model computes with have 16 bits. Each rank keeps a 32-bit *master* of each of its own, updates
that, and rounds it into the model, as in Micikevicius et al., Mixed Precision Training (arXiv 1710.03740), section 3.
With ``fp16`` the loss is multiplied by a scale before the backward pass and gradients are divided by it; a step whose
gradients are not finite on any rank of the pipeline is left out on all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.compat.loss_scale import LossScale
from weft.compat.session import state
from weft.errors import UsageError
from weft.torch import optimizer as weft_optimizer
from weft.torch import state as session_of
from weft.torch.collective import gather_texts
from weft.torch.optimizer import MASTERS, SCALE, clip_grad_norm_, gather_states, is_local
from weft.torch.recording import recorded


class DistributedOptimizer(weft_optimizer.DistributedOptimizer):
    """Wraps a ``torch.optim`` optimizer of the model's parameters.

    ``static_loss_scale``: what the loss is multiplied by with ``fp16``; ``dynamic_loss_scale``: find it, see
    :class:`LossScale`, whose arguments may be given as keywords or in a dict ``dynamic_loss_args``. Without ``fp16``
    and ``bf16`` these change nothing.
    """

    _is_accelerate_prepared = True
    """Tells Hugging Face's accelerate to leave this optimizer as it is: its own wrapper hides ``local_state_dict``."""

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

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before the backward pass."""
        return self.loss_scaler.loss_scale

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out, under the name that accelerate asks for."""
        return self.overflow

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part of the state, with the key ``_smp_is_partial``."""
        content = super().local_state_dict()
        content["_smp_is_partial"] = True
        return content

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
            model.register_post_partition_hook(lambda *_: self.load_state_dict(state_dict))
            return
        content = dict(state_dict)
        if content.get("_smp_is_partial"):
            content |= self._merged(content)
        self._load(content)

    def _load(self, content: Mapping[str, Any]) -> None:
        super().load_state_dict(content)

    def _waits_for(self) -> Any:
        """The model that has no partition yet, so that nobody knows which parameters are this rank's."""
        models = (model for model in session_of.session().models if model.optimizer is self)
        return next((model for model in models if not model.partitioned), None)

    def _merged(self, content: Mapping[str, Any]) -> dict[str, Any]:
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
            told = [json.loads(text) for text in texts]
            saved = {number for has, _ in told for number in has}
            if all(saved.intersection(wants) <= set(has) for has, wants in told):
                return {}
            copies = {number: {MASTERS: master} for number, master in masters.items()}
            everything = gather_states(session, {n: states.get(n, {}) | copies.get(n, {}) for n in held})
        masters = {n: entry.pop(MASTERS) for n, entry in everything.items() if MASTERS in entry}
        return {MASTERS: masters, "state": {n: entry for n, entry in everything.items() if entry}}

    def orig_state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer, as it is on this rank."""
        return self.optimizer.state_dict()

    def clip_master_grads(self, max_norm: float) -> Any:
        """Scale this pipeline's gradients so that their norm is at most ``max_norm``; returns the norm before."""
        return clip_grad_norm_([p for group in self.param_groups for p in group["params"]], max_norm)


class MasterOptimizer(DistributedOptimizer):
    """The same, with 32-bit masters; see the module. ``param_groups`` hold the masters from the first step on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._ready = False
        self._scale: float | None = None

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by: the same from the first backward pass to the step, even if a state is loaded
        between them, as Hugging Face's Trainer does."""
        if self._scale is None:
            self._scale = self.loss_scaler.loss_scale
        return self._scale

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The 16-bit parameters of this rank, in one group."""
        return [[low for low, _ in self.masters()]]

    def masters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each local 16-bit parameter with its master; made from the parameters' values at the first use after the
        partition. Before it there are none."""
        if not self._pairs and self._waits_for() is None:
            for group in self.optimizer.param_groups:
                for at, low in enumerate(group["params"]):
                    if is_local(low) and low.dtype in (torch.float16, torch.bfloat16):
                        master = nn.Parameter(low.detach().float().clone(), requires_grad=low.requires_grad)
                        group["params"][at] = master
                        self._pairs.append((low, master))
                        if low in self.optimizer.state:
                            self.optimizer.state[master] = self.optimizer.state.pop(low)
        return self._pairs

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
            if master.grad is not None and not torch.isfinite(master.grad).all():
                bad.fill_(1.0)
        for group in self.optimizer.param_groups:
            for other in group["params"]:
                if is_local(other) and other.grad is not None and not torch.isfinite(other.grad).all():
                    bad.fill_(1.0)
        session = session_of.session()
        if session.pipeline is not None:
            with session.doing("the check for overflow"):
                dist.all_reduce(bad, dist.ReduceOp.MAX, group=session.group("pp"))
        self.overflow = bool(bad)
        self._ready = True

    def clip_master_grads(self, max_norm: float) -> Any:
        """Scale the masters' gradients so that their norm over the pipeline is at most ``max_norm``.

        Returns the norm before, or -1 if this step overflows. Every rank calls it, before ``step``.
        """
        self._unscale()
        if self.overflow:
            return -1.0
        return super().clip_master_grads(max_norm)

    def step(self, closure: Any = None) -> Any:
        """Update the masters and round them into the model, unless gradients overflowed."""
        self._unscale()
        self._ready, self._scale = False, None
        self.loss_scaler.update(self.overflow)
        if self.overflow:
            return None
        result = super().step(closure)
        with torch.no_grad(), recorded(session_of.session(), "optimizer"):
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

    def _with_masters(self, content: dict[str, Any]) -> dict[str, Any]:
        numbers = {
            id(p): n for n, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])
        }
        content[MASTERS] = {numbers[id(master)]: master.detach() for _, master in self.masters()}
        content[SCALE] = self.scaling()
        return content

    def scaling(self) -> dict[str, Any]:
        return self.loss_scaler.state_dict()

    def load_scaling(self, content: Mapping[str, Any]) -> None:
        self.loss_scaler.load_state_dict(content)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part of the state, its masters and the loss scale."""
        self.masters()
        return self._with_masters(super().local_state_dict(gather_if_shard))

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the wrapped optimizer, all masters and the loss scale; collective over the pipeline."""
        self.masters()
        content = self._with_masters(super().state_dict())
        session = session_of.session()
        if session.pipeline is not None:
            own = {number: {MASTERS: master} for number, master in content[MASTERS].items()}
            with session.doing("the optimizer's state_dict()"):
                everything = gather_states(session, own)
            content[MASTERS] = {number: entry[MASTERS] for number, entry in everything.items()}
        return content

    def _load(self, content: Mapping[str, Any]) -> None:
        """With the masters and the loss scale if it has them."""
        masters, scale = content.get(MASTERS, {}), content.get(SCALE)
        self.masters()
        super()._load(content)
        numbers = [p for group in self.optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            for low, master in self._pairs:
                at = next(n for n, p in enumerate(numbers) if p is master)
                value = masters.get(at)
                if isinstance(value, Tensor):
                    master.copy_(value)
                    low.copy_(value)
        if scale is not None:
            self.load_scaling(scale)
