"""The ``torch.distributed`` backend "weft": gloo on the CPU and NCCL on GPUs, under one name.

    torch.distributed.init_process_group("weft")        or "smddp", for scripts that say so

    WeftGroup           what PyTorch and scripts hold
        all-reduce      large sums on the CPU by weft's algorithms, ReduceOp.AVG on the CPU too, also of integers;
                        NaN kept by MAX and MIN
        all others      as they are
    ProcessGroup        PyTorch's own, finds the backend by the tensors' device
    gloo, NCCL

The group in between is there because a method of a base class that C++ calls through a Python subclass runs with the
interpreter's lock held, and gloo's threads, which take it when they end, would wait for it for ever.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import UsageError
from weft.launch.discovery import REPLICA
from weft.launch.rendezvous import let_go
from weft.reduce.choice import choose
from weft.reduce.collective import Collective, Work
from weft.reduce.exchange import EXTREMES, mark_nan, nan_where_marked
from weft.transport.private_c10d import gives_works, nccl_options, number_operations, use_backend, work_of

NAMES = ("weft", "smddp")
LEAST_BYTES = 64 << 10
"""Smaller sums go to gloo: what an algorithm gains there is less than the thread that waits for it costs."""

PASSED_ON = (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "_start_coalescing", "all_gather_single",
    "all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "monitored_barrier", "recv", "recv_anysource", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""What goes to the group below as it is, as far as this version of PyTorch has it."""


_FLAT = ("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single")
"""One tensor to one tensor: NCCL asks for the number of values only, gloo for the shapes as well."""


class WeftGroup(dist.ProcessGroup):
    """Made by ``init_process_group("weft")`` and ``new_group``; see the module."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str = "weft"
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = name
        _living.add(self)
        self._below = dist.ProcessGroup(store, rank, size)
        self._collective: Collective | None = None
        self._waiting = ThreadPoolExecutor(1, "weft-backend")
        kinds = dist.ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, size, timeout)
        self._use("cpu", kinds.GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), rank, size, nccl_options(timeout))
            self._use("cuda", kinds.NCCL, nccl)

    def _use(self, device: str, kind: Any, backend: Any) -> None:
        number_operations(backend)
        for group in (self, self._below):
            use_backend(group, torch.device(device), kind, backend)

    def getBackendName(self) -> str:
        """The name by which it was asked for."""
        return self._name

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Reduce each tensor in place over the ranks; returns a work."""
        options = args[0] if args else kwargs.get("opts")
        several = [tensors] if isinstance(tensors, Tensor) else tensors
        if _keeps_no_nan(several, options):
            return self._extremes("allreduce", several, options)
        if isinstance(options, dist.AllreduceOptions) and all(
            t.device.type == "cpu" and (t.is_floating_point() or t.is_complex()) for t in several
        ):
            if options.reduceOp == dist.ReduceOp.AVG:
                for tensor in several:
                    tensor.div_(self.size())
                options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
            if (
                options.reduceOp == dist.ReduceOp.SUM
                and len(several) == 1
                and gives_works
                and _is_large(several[0])
            ):
                return self._sum(several[0])
        return self._run("allreduce", tensors, *args, **kwargs)

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Reduce each tensor to one rank; returns a work."""
        options = args[0] if args else kwargs.get("opts")
        several = [tensors] if isinstance(tensors, Tensor) else tensors
        if _keeps_no_nan(several, options):
            return self._extremes("reduce", several, options)
        return self._run("reduce", tensors, *args, **kwargs)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """One of gloo's or NCCL's collectives. Averages of integers, which gloo has not, are cut to integers as NCCL
        does it."""
        options = next((each for each in (*args, *kwargs.values()) if hasattr(each, "reduceOp")), None)
        results = [args[0]] if isinstance(args[0], Tensor) else args[0]
        if options is None or options.reduceOp != dist.ReduceOp.AVG or not all(map(_is_integers, results)):
            return getattr(self._below, name)(*args, **kwargs)
        options.reduceOp = dist.ReduceOp.SUM
        work = getattr(self._below, name)(*args, **kwargs)

        def divide() -> None:
            for tensor in results:
                tensor.div_(self.size(), rounding_mode="trunc")

        return self._then(work, results, divide)

    def _extremes(self, name: str, tensors: list[Tensor], options: Any) -> Any:
        """Largest or smallest numbers, and NaN where a rank has it."""
        values = [tensor.detach() for tensor in tensors]
        marked = [mark_nan(value, options.reduceOp) for value in values]
        work = getattr(self._below, name)(marked, options)

        def write() -> None:
            if name == "allreduce" or options.rootRank == self.rank():
                for value, reduced in zip(values, marked, strict=True):
                    value.copy_(nan_where_marked(reduced))

        return self._then(work, tensors, write)

    def _then(self, work: Work, tensors: list[Tensor], then: Callable[[], None]) -> Any:
        """The work of a collective, and what is done with its result."""
        if gives_works:
            return self._later(work, tensors, then)
        work.wait()
        then()
        return work

    def _later(self, work: Work, tensors: list[Tensor], then: Callable[[], None] = lambda: None) -> Any:
        """A work that is done when this one is, and what comes ``then``."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._waiting.submit(_wait, work, tensors, then, future)
        return work_of(future)

    def _sum(self, tensor: Tensor) -> Any:
        """By the algorithm that is the fastest here; measured at the first sum."""
        if self._collective is None:
            self._collective = choose(self._below)
        work = self._collective.all_reduce(tensor.view(-1))
        return work if isinstance(work, dist.Work) else self._later(work, [tensor])


_living: weakref.WeakSet[WeftGroup] = weakref.WeakSet()


@atexit.register
def _outlive() -> None:
    """Keep what is left for good: freed by the ending interpreter, a group would join gloo's threads, which wait
    for the interpreter's lock. What its threads still hold goes before."""
    let_go()
    for group in list(_living):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _is_large(tensor: Tensor) -> bool:
    large = tensor.numel() * tensor.element_size() >= LEAST_BYTES
    return large and tensor.layout == torch.strided and tensor.is_contiguous()


def _is_integers(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.device.type == "cpu"
        and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    )


def _keeps_no_nan(tensors: list[Tensor], options: Any) -> bool:
    """True if gloo would compare numbers, of which NaN is no larger and no smaller than others."""
    op = getattr(options, "reduceOp", None)
    compares = any(op == extreme for extreme in EXTREMES)  # not "in", which asks the other one
    return compares and all(t.device.type == "cpu" and t.is_floating_point() for t in tensors)


def _wait(
    work: Work, tensors: list[Tensor], then: Callable[[], None], future: torch.futures.Future[list[Tensor]]
) -> None:
    try:
        work.wait()
        then()
        future.set_result(tensors)
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: WeftGroup, *args: Any, **kwargs: Any) -> Any:
        if name in _FLAT and all(isinstance(t, Tensor) and t.is_contiguous() for t in args[:2]):
            args = (*(t.view(-1) for t in args[:2]), *args[2:])
        return self._run(name, *args, **kwargs) if args else getattr(self._below, name)(**kwargs)

    method.__name__ = name
    return method


for _name in PASSED_ON:
    if hasattr(dist.ProcessGroup, _name):
        setattr(WeftGroup, _name, _passed_on(_name))


def register() -> None:
    """Make the backends known to ``torch.distributed``; again does nothing."""
    for name in NAMES:
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, _maker(name), devices=["cpu", "cuda"])


def _maker(name: str) -> Callable[..., WeftGroup]:
    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> WeftGroup:
        if REPLICA in os.environ:
            raise UsageError(
                f"min_replicas is for steps of weft, and not for the backend {name}: leave one of them out"
            )
        return WeftGroup(store, rank, size, timeout, name)

    return make
