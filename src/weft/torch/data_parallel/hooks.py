"""weft's algorithms and compressions as communication hooks of PyTorch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import ConfigError
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
