"""Mixed precision: ``torch.amp`` as it is, and a gradient scaler whose ranks agree.

A rank sees only its own gradients. If one finds an overflow and skips its step while the others take theirs, the model
falls apart; so all ranks skip when one of them must, those without parameters included, and their scales stay equal.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from weft.reduce.exchange import all_reduce_extreme
from weft.torch.pytorch.private import version
from weft.torch.session import current
from weft.torch.tensors.shards import stays_sharded


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with one decision for all ranks of the job.

    Scale the loss inside the step (``model.backward(scaler.scale(loss))``), call ``unscale_``, ``step`` and ``update``
    after it, on every rank. With replicas an overflow reaches all of them through the averaged gradients anyway; along
    the pipeline, and over compressed gradients, this scaler carries it: one all-reduce of four bytes for each
    optimizer and step. ``device``: "cuda" or "cpu"; if not given, that of this rank. The other arguments are
    PyTorch's.
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any) -> None:
        session = current.session()
        super().__init__(device or session.device.type, *args, **kwargs)
        self._last_read = 0.0
        self._known: tuple[Tensor, int] | None = None
        """The scale, and how often it was written, when all that was written since was by ``update()``."""
        session.agreement.add_scaler(self)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        known = new_scale is None and self._is_known()
        super().update(new_scale)
        if known and self._scale is not None:
            self._known = self._scale, version(self._scale)

    def scale_as_set(self) -> float:
        """The scale as the script wrote it last, or as it began: not that of other ranks if one alone wrote it.

        It is read only then. What ``update()`` makes of it is the same on all ranks, and would have to be waited for.
        """
        if self._scale is None:
            return self.get_scale()
        if not self._is_known():
            self._last_read, self._known = self.get_scale(), (self._scale, version(self._scale))
        return self._last_read

    def _is_known(self) -> bool:
        return (
            self._known is not None
            and self._scale is self._known[0]
            and version(self._scale) == self._known[1]
        )

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Where PyTorch looks for overflows, for ``unscale_`` and ``step`` alike: what all ranks found."""
        found: dict[torch.device, Tensor] = {}
        for one in _alike(optimizer):  # PyTorch's own function takes either kind
            for device, flag in super()._unscale_grads_(one, inv_scale, found_inf, allow_fp16).items():
                found[device] = torch.maximum(found[device], flag) if device in found else flag
        found = found or {found_inf.device: found_inf}  # a rank without gradients must answer too
        session = current.session()
        group = session.group("world")
        if group is not None:
            anywhere = torch.stack([flag.to(found_inf.device) for flag in found.values()]).amax().cpu()
            with session.doing("GradScaler: looking for overflows"):
                all_reduce_extreme(anywhere, dist.ReduceOp.MAX, group)
            for flag in found.values():
                flag.copy_(anywhere)
        return found


def _alike(optimizer: Optimizer) -> list[Any]:
    """The optimizer; where it has shares of FSDP2's and whole parameters, two with one kind each."""
    kinds: dict[bool, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kinds.setdefault(stays_sharded(parameter), []).append(parameter)
    if len(kinds) < 2:
        return [optimizer]
    return [SimpleNamespace(param_groups=[{"params": parameters}]) for parameters in kinds.values()]
