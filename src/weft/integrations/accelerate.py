"""Hugging Face's accelerate with a model that weft splits: `from weft.integrations.accelerate import Accelerator`.

To accelerate, a process is what reads batches of its own: here that is a replica, not a rank. So it counts
replicas, puts no wrapper of its own around the model, and leaves talking between ranks to weft.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate  # type: ignore[import-not-found,import-untyped,unused-ignore]
import torch
from accelerate.state import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    AcceleratorState,
    PartialState,
)
from accelerate.utils import DistributedType  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn

from weft.communication import objects
from weft.compat.hf import operations
from weft.compat.hf.ranks import gather_over_replicas, reduce_over_replicas
from weft.errors import UsageError
from weft.integrations.alike import draw_alike, refuse_apart
from weft.session import ranks
from weft.torch.execution.thread_settings import in_microbatch
from weft.torch.model import DistributedModel
from weft.torch.optimizer import DistributedOptimizer
from weft.torch.session import current
from weft.torch.tensors.pytree import map_tensors

_RANKS = (
    "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_RANK",
)  # fmt: skip
"""By these accelerate would find that there are several processes, and connect them itself."""
_PLUGINS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)


class Accelerator(accelerate.Accelerator):
    """accelerate's own, which counts replicas where that counts processes.

    Make it after `weft.init`. `prepare` takes models and optimizers of weft and data loaders; inside of a `weft.step`
    function `backward` is the model's. `gather` and `reduce` go over the replicas.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        session = current.session()
        refuse_apart()
        asked = [name for name in _PLUGINS if kwargs.get(name) is not None]
        if asked:
            raise UsageError(
                f"weft's Accelerator has no {', '.join(asked)}: weft splits the model, leave it out"
            )
        if PartialState._shared_state and not PartialState._shared_state.get("_weft"):
            raise UsageError(
                "accelerate has connected the processes already: make weft's Accelerator before anything else of it"
            )
        with _hidden(_RANKS):
            PartialState(cpu=session.device.type == "cpu")
            _count_replicas()
            super().__init__(*args, **kwargs)
        if self.distributed_type != DistributedType.NO or self.mixed_precision not in ("no", "bf16"):
            raise UsageError(
                f"weft's Accelerator works with mixed_precision no or bf16, not {self.mixed_precision}, and without "
                f"{self.distributed_type.value}: leave them out of the arguments and of accelerate's configuration"
            )

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's own; ranks go on from the same random states, so that they shuffle data alike."""
        for each in args:
            if isinstance(each, nn.Module) and not isinstance(each, DistributedModel):
                raise UsageError(
                    f"prepare() got a plain {type(each).__name__}: wrap it first, weft.DistributedModel(model)"
                )
            if isinstance(each, torch.optim.Optimizer) and not isinstance(each, DistributedOptimizer):
                raise UsageError(
                    f"prepare() got a plain {type(each).__name__}: wrap it first, weft.DistributedOptimizer(optimizer)"
                )
        draw_alike(objects.WORLD)
        return super().prepare(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if not (current.session().tracing or in_microbatch()):
            super().backward(loss, **kwargs)
            return
        models = [model for model in self._models if isinstance(model, DistributedModel)]
        if len(models) != 1:
            raise UsageError(
                f"accelerator.backward(loss) does not know which of {len(models)} models: call model.backward(loss)"
            )
        models[0].backward(loss / self.gradient_accumulation_steps, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """The tensors of all replicas, one after another along dim 0."""
        return tensor if ranks.rdp_size() == 1 else gather_over_replicas(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum over the replicas, or "mean"; "none" gives what was there."""
        if reduction == "none" or ranks.rdp_size() == 1:
            return map_tensors(tensor, lambda each: each * scale, attributes=True)
        return reduce_over_replicas(tensor, reduction == "mean", scale)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Every rank calls it, and has random states of its own in it."""
        with _numbered_by_rank():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        with _numbered_by_rank():
            return super().load_state(*args, **kwargs)


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Inside, the variables of these names are not there."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ |= kept


def _counts() -> bool:
    """True while accelerate counts replicas."""
    return current.is_initialized() and bool(PartialState._shared_state.get("_weft"))


operations.install(_counts)


def _count_replicas() -> None:
    """accelerate's state says how many replicas there are, and which is this one's."""
    PartialState._shared_state.update(
        _weft=True, num_processes=ranks.rdp_size(), process_index=ranks.rdp_rank(),
        local_process_index=ranks.local_rank(),
    )  # fmt: skip
    for name, ours in (
        ("is_main_process", lambda: ranks.rank() == 0),
        ("is_local_main_process", lambda: ranks.local_rank() == 0),
        ("is_last_process", lambda: ranks.rank() == ranks.size() - 1),
    ):
        setattr(PartialState, name, property(_either(ours, PartialState.__dict__[name].fget)))
    PartialState.wait_for_everyone = _either(objects.barrier, PartialState.wait_for_everyone)


def _either(ours: Any, theirs: Any) -> Any:
    """`ours` while accelerate counts replicas."""

    def call(self: Any) -> Any:
        return ours() if _counts() else theirs(self)

    return call


@contextmanager
def _numbered_by_rank() -> Iterator[None]:
    """Inside, files with a process's number have that of the rank."""
    states = [PartialState._shared_state, AcceleratorState._shared_state]
    for each in states:
        each["process_index"] = ranks.rank()
    try:
        yield
    finally:
        for each in states:
            each["process_index"] = ranks.rdp_rank()
