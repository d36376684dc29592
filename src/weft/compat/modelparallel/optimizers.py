"""``smp.optimizers``: Adam, LAMB and NovoGrad under the names of apex's fused ones, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class FusedAdam(torch.optim.Adam):
    """Adam; with ``adam_w_mode`` the decay is decoupled from the gradients (AdamW)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **ignored: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)


class FusedLAMB(Optimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2): Adam's direction, at a length in proportion to the weights.

        m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
        u = m' / (sqrt(v') + eps) + decay * x           (m', v': divided by 1 - b1^t, 1 - b2^t)
        x <- x - lr * |x| / |u| * u                     (the ratio is 1 where either norm is 0)

    Unlike apex's, gradients are not clipped: clip them yourself.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        **ignored: Any,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        one, two = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(grad, grad, value=1 - two)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        if group["bias_correction"]:
            first, second = first / (1 - one ** state["step"]), second / (1 - two ** state["step"])
        update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        weights, length = parameter.norm(), update.norm()
        ratio = torch.where((weights > 0) & (length > 0), weights / length, torch.ones_like(weights))
        parameter.sub_(group["lr"] * ratio * update)


FusedLamb = FusedLAMB


class FusedNovoGrad(Optimizer):
    """NovoGrad (Ginsburg et al., arXiv 1905.11286, algorithm 1): one second moment for each tensor.

        v <- b2 v + (1 - b2) |g|^2                       (v = |g|^2 at the first step)
        m <- b1 m + (g / (sqrt(v) + eps) + decay * x)    (m = that sum at the first step)
        x <- x - lr * m

    Without correction of the bias. ``grad_averaging``: the sum counts 1 - b1 times after the first step.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
        **ignored: Any,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "grad_averaging": grad_averaging,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, square = self.state[parameter], parameter.grad.pow(2).sum()
                second = square if not state else two * state["exp_avg_sq"] + (1 - two) * square
                push = parameter.grad / (second.sqrt() + group["eps"]) + group["weight_decay"] * parameter
                if state:
                    push = one * state["exp_avg"] + (1 - one if group["grad_averaging"] else 1) * push
                state.update(exp_avg=push, exp_avg_sq=second)
                parameter.sub_(group["lr"] * push)
        return loss
