"""The watch over glue: what modules' own code runs between the modules that they call, in the first pass of a trace."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError
from weft.torch.execution.gradients import refuse_gradient
from weft.torch.pytorch.private import storage_key, version
from weft.torch.pytorch.torch_functions import GRADIENT_SETTER, GRADIENTS, METADATA, memory_written
from weft.torch.trace.tracer import Tracer

BY_NESTED = (
    "has nested tensors (torch.nested) in its own code, so it stays on one partition as a whole. To split it, keep "
    "them inside of its modules, and hand their values() and offsets() over"
)


TOGGLES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
GRADIENT_ACCESS = GRADIENTS | {GRADIENT_SETTER}


class GlueWatch(TorchFunctionMode):
    """Counts the operations that each module's own code runs, and notes which parameters they use."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TOGGLES and id(args[0]) in self.tracer.own:
            self.tracer.toggled.add(self.tracer.own[id(args[0])])
        if func in METADATA or self.tracer.going_back:  # an activation checkpoint runs it again
            return func(*args, **(kwargs or {}))
        if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
            raise UsageError(
                f"torch.distributed.{func.__name__}() was called inside a weft.step function, where ranks come at "
                "different times, and the first rank alone while it traces: call it before or after the step"
            )
        record = self.tracer.stack[-1]
        if func in GRADIENT_ACCESS and self.tracer.outside_modules and id(args[0]) in self.tracer.own:
            refuse_gradient(args[0], "reads" if func in GRADIENTS else "sets")
        record.operations += 1
        own = self.tracer.own
        operands = []
        placed = False
        for item in (*args, *(kwargs or {}).values()):
            for part in item if isinstance(item, (list, tuple)) else (item,):
                if isinstance(part, nn.Parameter) and id(part) in own:
                    record.parameters_used.setdefault(id(part), self.tracer.calls)
                    self.tracer.note_user(own[id(part)], record)
                    placed = True
                elif isinstance(part, Tensor):
                    if id(part) in self.tracer.buffers:
                        self.tracer.note_user(self.tracer.buffers[id(part)], record)
                    self.tracer.use(part, record)
                    operands.append(part)
                    placed |= part._weft_made is not None and part._weft_made.placed  # type: ignore[attr-defined]
        result = func(*args, **(kwargs or {}))
        for target in memory_written(func, args, kwargs or {}):
            self.tracer.writings.append((storage_key(target), version(target), record))
        if isinstance(result, Tensor) and result.is_nested:
            self.tracer.whole.setdefault(record.name, BY_NESTED)
        self.tracer.create(result, record, placed)
        self.tracer.operations.note(record.name, operands, result)
        return result
