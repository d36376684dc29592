"""PyTorch's ``DistributedDataParallel`` with what SageMaker's scripts ask of it besides.

weft's algorithms and compressions are communication hooks of it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from weft.errors import ConfigError, UsageError
from weft.reduce.all_reduce_queue import AllReduceQueue
from weft.reduce.choice import ALGORITHMS, choose
from weft.reduce.collective import Work
from weft.reduce.compression import make

GROUP_TIMEOUT = dist.default_pg_timeout


class Hook:
    """The state of :func:`hook` for one model.

    It has process groups of its own, made when the first bucket comes, over the ranks of ``state``: a process group, or
    None for all. Buckets travel beside the backward pass; a thread waits for them.
    """

    def __init__(self, compression: str | None, algorithm: str) -> None:
        self._compression = None if compression is None else make(compression)
        self._algorithm = algorithm
        self._queue: AllReduceQueue | None = None
        self._waiting = ThreadPoolExecutor(1, "weft-hook")

    def start(
        self, state: dist.ProcessGroup | None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start to average the bucket."""
        flat = bucket.buffer()
        if self._queue is None:
            self._queue = self._connect(state, flat.device)
        if self._queue.scale != 1.0:
            flat.mul_(self._queue.scale)
        work = self._queue.launch(bucket.index(), flat)
        devices: list[Any] | None = [flat.device] if flat.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        self._waiting.submit(_wait, work, flat, future, stream)
        return future

    def _connect(self, group: dist.ProcessGroup | None, device: torch.device) -> AllReduceQueue:
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        own = dist.new_group(
            ranks, GROUP_TIMEOUT, "nccl" if device.type == "cuda" else "gloo", use_local_synchronization=True
        )
        collective = choose(own, self._algorithm, device=device, compressed=self._compression is not None)
        return AllReduceQueue(collective, self._compression)


def _wait(work: Work, flat: torch.Tensor, future: torch.futures.Future[torch.Tensor], stream: Any) -> None:
    try:
        with torch.cuda.stream(stream):
            work.wait()
            future.set_result(flat)
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]


def hook(compression: str | None = None, algorithm: str = "auto") -> Callable[[Any, Any], Any]:
    """A communication hook for PyTorch's DDP: ``model.register_comm_hook(None, hook("int8"))``; one for each model.

    Args:
        compression: ``"fp16"``, ``"bf16"``, ``"int8"``, ``"topk"``, ``"powersgd"``, with options as
            :func:`weft.reduce.compression.make` takes them; None sends gradients as they are.
        algorithm: ``"direct"``, ``"shared"``, ``"hierarchical"``, or ``"auto"``: measured when the first bucket comes.

    Raises:
        ConfigError: There is no such compression or algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"there is no algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    made = Hook(compression, algorithm)
    return lambda state, bucket: made.start(state, bucket)  # DDP refuses annotations that are texts


class DistributedDataParallel(TorchDDP):
    """PyTorch's own, with the same arguments and methods, and these more:

    Args:
        module: The model; on its device already.
        device_ids: As PyTorch's.
        compression: How gradients travel: ``"int8"``, ``"fp16"``, ... as :func:`weft.torch.data_parallel.hook` takes
            it; None: as they are. It takes the place of the model's communication hook.
        algorithm: That of the all-reduce, by name; likewise. None: as PyTorch does, or measured with a compression.
        overlapping_allreduce: False: gradients travel in one bucket when the backward pass has ended.
        backward_passes_per_step: So many backward passes add up before gradients are averaged; each forward pass is
            taken to have one.
        bucket_cap_mb: MiB of gradients that travel together.
        **options: PyTorch's other arguments (``broadcast_buffers``, ``find_unused_parameters``, ...).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        *args: Any,
        compression: str | None = None,
        algorithm: str | None = None,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise UsageError(
                f"backward_passes_per_step is {backward_passes_per_step!r}: give a whole number of at least 1"
            )
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise UsageError(
                f"bucket_cap_mb is {bucket_cap_mb!r}: give a number of MiB above 0, for example 25"
            )
        own = hook(compression, algorithm or "auto") if compression or algorithm else None
        if not overlapping_allreduce:
            size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
            bucket_cap_mb = size // (1 << 20) + 1
        if bucket_cap_mb is not None:
            options["bucket_cap_mb"] = bucket_cap_mb
        super().__init__(module, device_ids, *args, **options)
        self._passes_per_step = backward_passes_per_step
        self._passes = 0
        if own is not None:
            self.register_comm_hook(self.process_group, own)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's; gradients of the backward pass that follows are averaged unless more passes are to come."""
        if self._passes_per_step == 1 or not torch.is_grad_enabled() or not self.require_backward_grad_sync:
            return super().forward(*inputs, **kwargs)
        self._passes += 1
        if self._passes % self._passes_per_step:
            with self.no_sync():
                return super().forward(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)
