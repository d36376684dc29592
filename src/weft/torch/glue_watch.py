"""What the code of the modules themselves runs, between the modules that they call, in the watching pass of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.torch.private import has_memory, storage_key, version
from weft.torch.rules import METADATA, written

if TYPE_CHECKING:
    from weft.torch.trace import Tracer


class GlueWatch(TorchFunctionMode):
    """Counts the operations that each module's own code runs, and notes which parameters they use."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or self.tracer.going_back:  # an activation checkpoint runs it again
            return func(*args, **(kwargs or {}))
        record = self.tracer.stack[-1]
        record.operations += 1
        own = self.tracer.own
        operands = []
        for item in (*args, *(kwargs or {}).values()):
            for part in item if isinstance(item, (list, tuple)) else (item,):
                if isinstance(part, nn.Parameter) and id(part) in own:
                    record.parameters_used.setdefault(id(part), self.tracer.calls)
                elif isinstance(part, Tensor):
                    self.tracer.use(part, record)
                    operands.append(part)
        result = func(*args, **(kwargs or {}))
        target = written(func, args, kwargs or {})
        if isinstance(target, Tensor) and has_memory(target):
            self.tracer.writings.append((storage_key(target), version(target), record))
        if isinstance(result, Tensor) and result.is_nested:
            self.tracer.whole.setdefault(record.name, "")
        self.tracer.create(result, record)
        self.tracer.operations.note(record.name, operands, result)
        return result


def contains(outer: str, inner: str, at_top: bool) -> bool:
    """Whether module ``outer`` is ``inner`` or has it inside; nothing but the step itself is at the top."""
    if at_top:
        return False
    return outer == "" or inner == outer or inner.startswith(f"{outer}.")
