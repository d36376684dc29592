"""Names of ``torch.cuda`` that answer on a machine without CUDA, for scripts that use these names without asking.

    Event, Stream, current_stream, stream(...)    events that measure time; streams that have nothing to wait for
    get_device_properties, mem_get_info, ...      the host's: its cores and its memory
    FloatTensor, HalfTensor, ...                  the tensor types of the CPU
    get_rng_state, Generator(device="cuda")       the CPU's generator
    is_available(), device_count()                with --device cpu: true, and the host's ranks; scripts only

Libraries ask ``is_available`` too, and would go on to use CUDA. So whose code asks decides: files of installed packages
and of the standard library get PyTorch's own answer.
"""

from __future__ import annotations

import functools
import inspect
import os
import platform
import sysconfig
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import weft
from weft.torch.pytorch.torch_functions import STANDS_FOR
from weft.untrusted import whole

CAPABILITY = (7, 0)
"""The numbers of a V100, the first GPU with fp16 units: no script refuses it or expects bfloat16 or TF32 of it."""
_TYPES = (
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor", "CharTensor", "ShortTensor",
    "IntTensor", "LongTensor", "BoolTensor",
)  # fmt: skip
_LIBRARIES = tuple(
    {
        os.path.realpath(sysconfig.get_path(name)) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    | {os.path.dirname(os.path.realpath(weft.__file__)) + os.sep}
)


class Event:
    """A moment; :meth:`elapsed_time` gives the milliseconds between two."""

    def __init__(self, *ignored: Any, **also_ignored: Any) -> None:
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        if self._at is None or end_event._at is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return 1000 * (end_event._at - self._at)

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    """The one stream that there is. All work that a stream was given is done."""

    device = torch.device("cpu")
    device_index = cuda_stream = stream_id = priority = 0

    def __init__(self, *ignored: Any, **also_ignored: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *details: Any) -> None:
        pass


class StreamContext(nullcontext[Any]):
    """``torch.cuda.stream(...)``, a context that changes nothing."""


class Device:
    """``torch.cuda.device(0)``, a context that changes nothing."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *details: Any) -> None:
        pass


class _GeneratorMeta(type):
    def __call__(cls, device: Any = "cpu") -> Any:
        return cls.real("cpu" if str(device).startswith("cuda") else device)  # type: ignore[attr-defined]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)  # type: ignore[attr-defined]


class Generator(metaclass=_GeneratorMeta):
    """Stands for ``torch.Generator``: makes real ones, the CPU's for CUDA."""

    real: Any = torch.Generator


def memory() -> tuple[int, int]:
    """The host's free and whole memory in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def properties(device: Any = None) -> SimpleNamespace:
    """The properties of the host, in the form of ``torch.cuda.get_device_properties``."""
    return SimpleNamespace(
        name=device_name(), major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=memory()[1],
        multi_processor_count=os.cpu_count() or 1, is_integrated=1, is_multi_gpu_board=0, warp_size=32,
    )  # fmt: skip


def device_name(device: Any = None) -> str:
    return platform.processor() or platform.machine() or "CPU"


def asked_by_script() -> bool:
    """True if the code that calls weft's caller is the script's own, and none of a library."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    return frame is not None and is_of_script(frame.f_code.co_filename)


def is_of_script(file: str) -> bool:
    """True if a file is neither Python's own nor of an installed package.

    >>> is_of_script("/home/me/train.py"), is_of_script("/home/me/.local/lib/python3.12/site-packages/x/y.py")
    (True, False)
    """
    path = os.path.realpath(file)
    # Packages of a user's own folder and of Debian lie beside those that sysconfig names.
    packages = {"site-packages", "dist-packages"}.intersection(path.split(os.sep))
    return not (file.startswith("<frozen") or packages or path.startswith(_LIBRARIES))


def install(constant: Callable[..., Any], pretend: bool) -> None:
    """Put the names into ``torch.cuda``. ``constant(name, value)`` makes a function that gives a value. ``pretend``:
    the script sees CUDA, because the job was started with ``--device cpu``.
    """
    cuda = torch.cuda
    was_available, count = cuda.is_available, cuda.device_count

    @functools.wraps(was_available)
    def is_available() -> bool:
        return (pretend and asked_by_script()) or was_available()

    @functools.wraps(count)
    def device_count() -> int:
        if not (pretend and asked_by_script()):
            return count()
        return whole(os.environ.get("LOCAL_WORLD_SIZE", "1")) or 1

    def current_stream(device: Any = None) -> Stream:
        return Stream()

    for name, value in {
        "is_available": is_available, "device_count": device_count, "Event": Event, "Stream": Stream,
        "ExternalStream": Stream, "stream": StreamContext, "StreamContext": StreamContext,
        "current_stream": current_stream, "default_stream": current_stream, "device": Device, "device_of": Device,
        "mem_get_info": lambda device=None: memory(),
        "get_device_properties": properties, "get_device_name": device_name,
    }.items():  # fmt: skip
        setattr(cuda, name, value)
    for name, value in {
        "set_stream": None, "get_device_capability": CAPABILITY, "current_blas_handle": 0, "memory_summary": "",
        "memory_snapshot": [], "utilization": 0, "can_device_access_peer": False, "get_arch_list": [],
    }.items():  # fmt: skip
        setattr(cuda, name, constant(name, value))
    _replace_types()
    _replace_random_states()
    Generator.real = torch.Generator
    torch.Generator = Generator  # type: ignore[misc,assignment]


def _replace_types() -> None:
    """``torch.cuda.FloatTensor``, as a class and by its name."""
    for name in _TYPES:
        setattr(torch.cuda, name, getattr(torch, name))
    cast, default = Tensor.type, torch.set_default_tensor_type

    def here(kind: Any) -> Any:
        return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind

    @functools.wraps(cast)
    def type_of(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return cast(self) if dtype is None else cast(self, here(dtype), *args, **kwargs)

    @functools.wraps(default)
    def set_default_tensor_type(t: Any, /) -> None:
        default(here(t))

    setattr(type_of, STANDS_FOR, cast)
    Tensor.type = type_of  # type: ignore[method-assign,assignment]
    torch.set_default_tensor_type = set_default_tensor_type


def _replace_random_states() -> None:
    def get_rng_state(device: Any = "cuda") -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
        """Change nothing: where a script sets the CPU's state too, the CPU's counts."""

    def get_rng_state_all() -> list[Tensor]:
        return [torch.get_rng_state()]

    def set_rng_state_all(new_states: Any) -> None:
        """Nothing; see :func:`set_rng_state`."""

    for function in (get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all):
        setattr(torch.cuda, function.__name__, function)
        setattr(torch.cuda.random, function.__name__, function)
