"""Answers of `torch.cuda` for the emulated GPU: streams, storages and groups; its tensors: `emulated_tensors.py`."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.emulated_tensors import FREED, GENERATOR, PINNED, WAITS, address

TOTAL_BYTES = 8 << 30


class Stream:
    """All work is done at once, so nothing is left to wait for."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.stream_id, self.cuda_stream = torch.device("cuda", 0), id(self), id(self)

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        WAITS.note("stream.synchronize")

    def __enter__(self) -> Stream:
        self.before = torch.cuda.current_stream()
        torch.cuda.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.before)


class Event:
    """A moment of the host."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3

    def synchronize(self) -> None:
        WAITS.note("event.synchronize")


class _Inside:
    """`torch.cuda.stream(...)`, or `torch.cuda.device(...)`, which changes nothing: there is one."""

    def __init__(self, entered: Any = None) -> None:
        self.entered = entered

    def __enter__(self) -> None:
        if isinstance(self.entered, Stream):
            self.entered.__enter__()

    def __exit__(self, *_: object) -> None:
        if isinstance(self.entered, Stream):
            self.entered.__exit__()


_here = threading.local()
_default = Stream()
_PROPERTIES = SimpleNamespace(
    name="emulated", uuid="emulated", total_memory=TOTAL_BYTES, major=8, minor=0, multi_processor_count=1
)


def _set_stream(stream: Stream) -> None:
    _here.stream = stream


def _nccl() -> None:
    """Groups of NCCL are gloo's, which takes the same bytes; see `emulated_tensors`."""
    dist.is_nccl_available = lambda: True
    new_group, begin = dist.new_group, dist.init_process_group

    def group(ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **more: Any) -> Any:
        if backend == "nccl":
            backend = "gloo"
            more.pop("device_id", None)
        return new_group(ranks, timeout, backend, *rest, **more)

    dist.new_group = group
    dist.Logger.set_runtime_stats_and_log = lambda logger: None  # DDP's, by events of the device
    dist.init_process_group = lambda backend=None, *rest, **more: begin(
        "gloo" if backend == "nccl" else backend, *rest, **more
    )


def _memory() -> None:
    """Storages that move, come and go, and pinned memory."""
    made = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        found = made(*args, **kwargs)
        if pin_memory:
            PINNED.add(address(found))
        return found

    def pinned(tensor: Tensor, *_: Any) -> Tensor:
        found = tensor.clone()
        PINNED.add(address(found))
        return found

    def moved(
        storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False
    ) -> torch.UntypedStorage:
        return bytes_of(storage).to(device, non_blocking=non_blocking, copy=True).untyped_storage()

    def bytes_of(storage: torch.UntypedStorage) -> Tensor:
        return made(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resized(storage, nbytes)
        if nbytes:
            FREED.discard(storage._cdata)
            assert storage.nbytes() == nbytes, "memory that is given back comes again"
        else:
            bytes_of(storage).fill_(255)
            FREED.add(storage._cdata)
        return storage

    def size(storage: torch.UntypedStorage) -> int:
        return 0 if storage._cdata in FREED else sized(storage)

    resized, sized = torch.UntypedStorage.resize_, torch._C.StorageBase.nbytes
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    torch.UntypedStorage.size = torch.UntypedStorage.nbytes = size  # type: ignore[method-assign]
    torch.UntypedStorage.clone = lambda storage: bytes_of(storage).clone().untyped_storage()  # type: ignore[method-assign]
    torch.empty = empty
    torch.UntypedStorage.to = moved  # type: ignore[method-assign]
    Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    Tensor.pin_memory = pinned  # type: ignore[method-assign]
    Tensor.isPINNED = lambda tensor, *_: address(tensor) in PINNED  # type: ignore[method-assign]


def install() -> None:
    """From now on `torch.cuda` tells of one GPU."""
    _nccl()
    _memory()
    for name, value in {
        "_initialized": True,
        "_lazy_init": lambda: None, "init": lambda: None, "is_initialized": lambda: True, "is_available": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "get_device_name": lambda *_: "emulated", "get_device_properties": lambda *_: _PROPERTIES,
        "get_device_capability": lambda *_: (8, 0), "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: WAITS.note("synchronize"), "Stream": Stream, "Event": Event,
        "current_stream": lambda *_: getattr(_here, "stream", _default), "default_stream": lambda *_: _default,
        "set_stream": _set_stream, "stream": _Inside, "device": _Inside, "is_current_stream_capturing": lambda: False,
        "default_generators": (GENERATOR,), "manual_seed": GENERATOR.manual_seed,
        "manual_seed_all": GENERATOR.manual_seed, "get_rng_state": lambda *_: GENERATOR.get_state(),
        "set_rng_state": lambda state, *_: GENERATOR.set_state(state), "empty_cache": lambda: None,
        "max_memory_allocated": lambda *_: 0, "memory_allocated": lambda *_: 0, "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0, "reset_peak_memory_stats": lambda *_: None,
        "mem_get_info": lambda *_: (TOTAL_BYTES, TOTAL_BYTES), "memory_stats": lambda *_: {},
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
