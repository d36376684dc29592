"""torchmetrics counts a batch once, though all ranks of a pipeline have the batch.

A metric gathers what all processes have counted. The ranks of a pipeline are one replica, and see the same batches: a
sum over all processes would count each sample as often as there are partitions. So a metric that gathers over "all
processes" gathers from one rank of each replica. A metric with a process group of its own uses that group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from weft.import_hooks import when_imported


@functools.cache
def count_replicas_once(present: Callable[[], Any]) -> None:
    """Make torchmetrics count each replica once, also if it is imported later. ``present()``: the session, if any."""
    for name in ("torchmetrics.utilities.distributed", "torchmetrics.metric"):
        when_imported(name, functools.partial(_replace, present))


def _replace(present: Callable[[], Any], module: ModuleType) -> None:
    original: Callable[..., list[Tensor]] = module.gather_all_tensors
    if hasattr(original, "__wrapped__"):
        return  # the module has imported the function from a module where it was replaced already

    @functools.wraps(original)
    def gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
        session = present() if group is None else None
        if session is None or session.mesh.pp * session.mesh.tp == 1:
            return original(result, group)
        if session.mesh.rdp == 1:
            return [result]
        with session.doing(f"{__name__}: a metric of all replicas"):
            return [each.to(result.device) for each in original(result.cpu(), session.group("rdp"))]

    module.gather_all_tensors = gather_all_tensors  # type: ignore[attr-defined]
