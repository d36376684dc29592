"""Names of ``torch.cuda`` that measure, profile, capture and allocate, on a machine without CUDA.

    memory_stats, utilization, temperature, ...          zeros, under the keys that scripts read
    profiler.start, cudart().cudaProfilerStart, nvtx     nothing
    make_graphed_callables                               what it was given, which computes the same
    CUDAGraph, MemPool, nccl.all_reduce, ...             one sentence that says what to leave out

A captured graph cannot be stood in for: replaying it would compute nothing. So it is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from weft.errors import UsageError

_GRAPHS = "CUDA graphs, which need a GPU: call what they would capture instead"
_ALLOCATORS = "the GPU's own memory, which is not there: leave it out, or ask torch.cuda.is_available() first"
_ONE_PROCESS = (
    "several GPUs of one process, which are not there: use torch.distributed, with a process for each"
)
REFUSED = {
    "CUDAGraph": _GRAPHS, "graph": _GRAPHS, "graph_pool_handle": _GRAPHS, "MemPool": _ALLOCATORS,
    "use_mem_pool": _ALLOCATORS, "CUDAPluggableAllocator": _ALLOCATORS, "change_current_allocator": _ALLOCATORS,
    "caching_allocator_alloc": _ALLOCATORS, "caching_allocator_delete": _ALLOCATORS,
    "GreenContext": "a part of a GPU: leave it out",
    "get_stream_from_external": "a stream of another library, which is not there: leave it out",
}  # fmt: skip
"""The functions that need a GPU, by name, with the rest of the sentence that refuses each."""
_NCCL = ("all_gather", "all_reduce", "broadcast", "init_rank", "reduce", "reduce_scatter", "unique_id")
_NOTHING = (
    "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats", "set_sync_debug_mode", "seed", "seed_all",
)  # fmt: skip
_ANSWERS: dict[str, Any] = {
    "clock_rate": 0, "device_memory_used": 0, "get_sync_debug_mode": 0, "is_current_stream_capturing": False,
    "current_solver_handle": 0, "list_gpu_processes": "no processes are running", "memory_usage": 0, "power_draw": 0,
    "temperature": 0, "get_allocator_backend": "native", "get_per_process_memory_fraction": 1.0,
}  # fmt: skip


def install(constant: Callable[..., Any]) -> None:
    """Put the names into ``torch.cuda`` and its modules; ``constant(name, value)`` makes a function."""
    cuda = torch.cuda
    for name in _NOTHING:
        _put(cuda, name, constant(name))
    for name, value in _ANSWERS.items():
        _put(cuda, name, constant(name, value))
    for name, what in REFUSED.items():
        kind = isinstance(getattr(cuda, name, None), type)
        _put(cuda, name, _refused_class(name, what) if kind else _refused(f"torch.cuda.{name}", what))
    for name in _NCCL:
        _put(cuda.nccl, name, _refused(f"torch.cuda.nccl.{name}", _ONE_PROCESS))
    _put(cuda.nccl, "version", constant("version", (0, 0, 0)))
    for name in ("start", "stop"):
        _put(cuda.profiler, name, constant(name))
    for name in ("range_start", "range_end"):
        _put(cuda.nvtx, name, constant(name, 0))
    for function in (memory_stats, memory_stats_as_nested_dict, initial_seed, cudart, make_graphed_callables):
        _put(cuda, function.__name__, function)
    for module in (cuda.memory, cuda.random, cuda.streams, cuda.graphs, cuda.profiler):
        for name in set(vars(module)) & set(vars(cuda)):
            if not name.startswith("_"):
                setattr(module, name, getattr(cuda, name))


def _put(module: Any, name: str, value: Any) -> None:
    """Put a value in the place of a name, if this version of PyTorch has the name, and keep what the name wrapped.

    PyTorch's compiler looks at what some of the names wrap.
    """
    original = getattr(module, name, None)
    if original is None:
        return
    if not isinstance(value, type):
        value.__wrapped__ = getattr(original, "__wrapped__", original)
    setattr(module, name, value)


def _refusal(name: str, what: str) -> UsageError:
    return UsageError(f"{name} is for {what}")


def _refused(name: str, what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _refusal(name, what)

    refuse.__name__ = name.rpartition(".")[2]
    return refuse


def _refused_class(name: str, what: str) -> type:
    """A class for ``isinstance`` and annotations, of which no object can be made."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        raise _refusal(f"torch.cuda.{name}", what)

    return type(name, (), {"__init__": init, "__doc__": f"Stands for torch.cuda.{name}, which needs a GPU."})


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """The statistics of a GPU that holds nothing: zero under every key."""
    found = dict.fromkeys(
        (
            f"{what}.{pool}.{kind}"
            for what in (
                "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
                "active_bytes", "inactive_split_bytes", "requested_bytes",
            )
            for pool in ("all", "large_pool", "small_pool")
            for kind in ("current", "peak", "allocated", "freed")
        ),
        0,
    )  # fmt: skip
    for what in ("oversize_allocations", "oversize_segments"):
        found |= {f"{what}.{kind}": 0 for kind in ("current", "peak", "allocated", "freed")}
    alone = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
    return OrderedDict(sorted({**found, **dict.fromkeys(alone, 0), "max_split_size": -1}.items()))


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """The statistics of :func:`memory_stats`, with a dict in a dict for each dot of a key."""
    nested: dict[str, Any] = {}
    for key, value in memory_stats().items():
        *path, last = key.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def initial_seed() -> int:
    """The seed of the CPU's generator: there is no other."""
    return torch.initial_seed()


def make_graphed_callables(callables: Any, *ignored: Any, **also_ignored: Any) -> Any:
    """The callables as they were given: they compute what their graphs would."""
    return callables


class Runtime:
    """``torch.cuda.cudart()``: its calls do nothing and return success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cuda"):
            raise AttributeError(f"the CUDA runtime has no {name}")
        return lambda *args: 0


def cudart() -> Runtime:
    """The CUDA runtime."""
    return Runtime()
