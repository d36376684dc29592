"""torchmetrics counts a batch once, also if the ranks of a pipeline all have it.

A metric gathers what all processes have counted. The ranks of a pipeline are one replica, and see the same batches: a
sum over all processes would count each sample as often as there are partitions. So what is gathered over "all
processes" comes from one rank of each replica; a metric with a process group of its own uses that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from weft.imported import when_imported


@functools.cache
def count_replicas_once(present: Callable[[], Any]) -> None:
    """From now on, in this process, and also if torchmetrics is imported later; ``present()``: the session, if any."""
    for name in ("torchmetrics.utilities.distributed", "torchmetrics.metric"):
        when_imported(name, functools.partial(_replace, present))


def _replace(present: Callable[[], Any], module: ModuleType) -> None:
    original: Callable[..., list[Tensor]] = module.gather_all_tensors
    if hasattr(original, "__wrapped__"):
        return  # the module has taken it from one where it was replaced

    @functools.wraps(original)
    def gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
        session = present() if group is None else None
        if session is None or session.mesh.pp == 1:
            return original(result, group)
        if session.mesh.size("dp") == 1:
            return [result]
        with session.doing(f"{__name__}: a metric of all replicas"):
            return [each.to(result.device) for each in original(result.cpu(), session.group("dp"))]

    module.gather_all_tensors = gather_all_tensors  # type: ignore[attr-defined]
