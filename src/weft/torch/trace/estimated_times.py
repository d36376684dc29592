"""Tracing a model that has no memory: the step runs on the meta device, and a clock counts instead of running.

An operation takes   flops / FLOPS + bytes read and written / BYTES   seconds, by PyTorch's own formulas for
flops (``torch.utils.flop_counter``). Only ratios between units matter, so the rates are those of one CPU core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.pytorch.private import TorchDispatchMode, tables_of

FLOPS = 5e10
BYTES = 1e10


class Clock(TorchDispatchMode):
    """Counts in ``seconds`` what the operations inside would have taken."""

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # it loads Triton

        self.seconds = 0.0
        self._formulas = flop_registry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            self.seconds += formula(*args, **(kwargs or {}), out_val=result) / FLOPS
        if not func.is_view:
            outputs = result if isinstance(result, (list, tuple)) else (result,)
            moved = sum(t.numel() * t.element_size() for t in (*args, *outputs) if isinstance(t, Tensor))
            self.seconds += moved / BYTES
        return result


@contextmanager
def on_meta(root: nn.Module) -> Iterator[None]:
    """Inside, all parameters and buffers of the model are on the meta device.

    Code that asks PyTorch whether it is being traced (``torch.jit.is_tracing``), to read no values then, is told so.
    """
    kept: list[tuple[dict[str, Any], str, Any]] = []
    twins: dict[int, Any] = {}
    for module in root.modules():
        for table in tables_of(module):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                kept.append((table, name, tensor))
                if id(tensor) not in twins:
                    twin = torch.empty_like(tensor, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
                    twins[id(tensor)] = twin
                table[name] = twins[id(tensor)]
    asked = torch.jit.is_tracing
    torch.jit.is_tracing = lambda: True
    try:
        yield
    finally:
        torch.jit.is_tracing = asked
        for table, name, tensor in kept:
            table[name] = tensor
