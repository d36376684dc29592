"""Buffers of replicas under the data parallel names: the first rank may evaluate alone.

PyTorch's DistributedDataParallel sends the first rank's buffers to all *before* a forward pass, the first one of an
evaluation too, so a rank that evaluates alone waits for ever. Here they are sent *after* a forward pass in training,
and written where PyTorch writes them, before the next one:

    PyTorch     send, write | forward | backward    send, write | forward (evaluation)
    here              write | forward | send | backward   write | forward (evaluation)

So all ranks see the same buffers as ever, and an evaluation sends nothing. Not written at once, because the backward
pass may need those of its forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_HELD = "_weft_buffers"


class Buffers:
    """The buffers of one wrapped model, and the first rank's values after the last forward pass in training."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        # The compiler leaves these alone. Not as decorators: it would be imported, as by the first optimizer.
        self.before, self.after = map(torch.compiler.disable, (self._before, self._after))
        self._left = False
        self._newest: list[Tensor] = []

    def _before(self, model: DistributedDataParallel, inputs: Any) -> None:
        self._write(model)

    def _after(self, model: DistributedDataParallel, inputs: Any, result: Any) -> None:
        grads = torch.is_grad_enabled() and model.require_backward_grad_sync
        if model.training and grads and not self._left:
            self._send(model)

    def leave(self, model: DistributedDataParallel) -> None:
        """Let PyTorch send the model's buffers from here on."""
        self._left = True
        self._write(model)

    def _write(self, model: DistributedDataParallel) -> None:
        """Write the values that came last into the model's buffers."""
        with torch.no_grad():
            for buffer, newest in zip(_of(model), self._newest, strict=False):
                buffer.copy_(newest)
        self._newest = []

    def _send(self, model: DistributedDataParallel) -> None:
        """Send the buffers of the group's first rank to all ranks; collective."""
        own = _of(model)
        first = dist.get_global_rank(self._group, 0)
        self._newest = [buffer.detach().clone() for buffer in own]
        for kind in dict.fromkeys((buffer.dtype, buffer.device) for buffer in own):
            several = [new for new in self._newest if (new.dtype, new.device) == kind]
            flat = torch.cat([new.flatten() for new in several])
            dist.broadcast(flat, first, group=self._group)
            for new, part in zip(several, flat.split([each.numel() for each in several]), strict=True):
                new.copy_(part.view_as(new))


def _of(model: DistributedDataParallel) -> list[Tensor]:
    ignored: Any = model.parameters_to_ignore
    return [buffer for name, buffer in model.module.named_buffers() if name not in ignored]


def install(names: Sequence[str]) -> None:
    """Let every DistributedDataParallel over a backend of these names send its buffers so; once for the process."""
    made = DistributedDataParallel.__init__
    due, joined = DistributedDataParallel.will_sync_module_buffers, DistributedDataParallel.join_hook

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if dist.get_backend(self.process_group) in names and due(self):
            self.__dict__[_HELD] = held = Buffers(self)
            self.register_forward_pre_hook(held.before)
            self.register_forward_hook(held.after)

    @functools.wraps(due)
    def will_sync_module_buffers(self: Any) -> bool:
        return _HELD not in self.__dict__ and due(self)

    @functools.wraps(joined)
    def join_hook(self: Any, **kwargs: Any) -> Any:
        """Leave the sending of buffers to PyTorch: ranks without more inputs take part in what PyTorch sends."""
        held: Buffers | None = self.__dict__.pop(_HELD, None)
        if held is not None:
            held.leave(self)
        return joined(self, **kwargs)

    model: Any = DistributedDataParallel
    model.__init__ = init
    model.will_sync_module_buffers, model.join_hook = will_sync_module_buffers, join_hook
