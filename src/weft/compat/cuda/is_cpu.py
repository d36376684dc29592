"""Calls for CUDA mean the CPU, so that scripts with such calls run on a machine without CUDA.

    torch.device("cuda:1"), "cuda" as a device anywhere, .cuda()      the CPU
    torch.cuda.set_device, synchronize, empty_cache, ...              nothing
    pin_memory                                                        the tensor as it is
    torch.cuda.amp.autocast, torch.autocast("cuda")                   autocast on the CPU, in bfloat16 by default
    DistributedDataParallel(..., device_ids=[0])                      without device_ids

Other names of ``torch.cuda`` are in ``names`` and ``tools``, those of ``torch.distributed`` in
``nccl_is_gloo``. Functions are replaced in ``torch`` after weft has taken them for
itself, so what happens inside of a step is as always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from weft.compat.cuda import names, nccl_is_gloo, sync_batch_norm, tools
from weft.torch.pytorch.private import constructors, scripted_as
from weft.torch.pytorch.torch_functions import STANDS_FOR

CPU = torch.device("cpu")
_Device = torch.device
_installed = False

_NOTHING = (
    "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_accumulated_memory_stats", "ipc_collect", "init", "manual_seed",
    "manual_seed_all", "set_per_process_memory_fraction",
)  # fmt: skip
_ZERO = (
    "current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_cached", "max_memory_cached",
)  # fmt: skip


def installed() -> bool:
    """True if calls for CUDA mean the CPU in this process."""
    return _installed


def install(pretend: bool = False) -> None:
    """Put the meanings in place, once for the process; only where there is no CUDA. ``pretend``: scripts see one."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    import weft.torch  # noqa: F401  # it compares functions by identity, so it needs the originals

    _set(torch, device=_DeviceName)
    for name in _NOTHING:
        setattr(torch.cuda, name, _constant(name))
    for name in _ZERO:
        setattr(torch.cuda, name, _constant(name, 0))
    names.install(_constant, pretend)
    tools.install(_constant)
    nccl_is_gloo.install(pretend)
    sync_batch_norm.install()
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _constant(name))
    _replace_tensor_methods()
    _replace_constructors()
    _replace_autocast()
    _replace_loading()
    _replace_data_parallel()


def _set(holder: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(holder, name, value)


def _constant(name: str, value: Any = None) -> Callable[..., Any]:
    """A function of its own for each name: the compiler knows PyTorch's functions by identity."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    answer.__name__ = name
    return answer


def _itself(name: str) -> Callable[..., Any]:
    """A method of that name which returns its object unchanged."""

    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    same.__name__ = name
    return same


def is_cuda(device: Any) -> bool:
    """True if a device, given in any way, means CUDA: a name, a number, a ``torch.device``."""
    if isinstance(device, bool):
        return False
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, (int, _Device)) and (isinstance(device, int) or device.type == "cuda")


class _Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        first = kwargs.get("type", kwargs.get("device", args[0] if args else None))
        return CPU if is_cuda(first) else _Device(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Device)


class _DeviceName(metaclass=_Meta):
    """Stands for ``torch.device``: makes real ones, the CPU for CUDA."""


def _replace_tensor_methods() -> None:
    to, module_to = Tensor.to, nn.Module.to

    @functools.wraps(to)
    def tensor_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *_without_cuda(args), **_without_cuda_names(kwargs))

    @functools.wraps(module_to)
    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module_to(self, *_without_cuda(args), **_without_cuda_names(kwargs))

    setattr(tensor_to, STANDS_FOR, to)
    _set(Tensor, to=tensor_to, cuda=_itself("cuda"), pin_memory=_itself("pin_memory"))
    _set(Tensor, record_stream=_constant("record_stream"))
    for storage in (
        torch.UntypedStorage,
        torch.TypedStorage,
    ):  # map_location=lambda storage, place: storage.cuda()
        _set(storage, cuda=_itself("cuda"), pin_memory=_itself("pin_memory"))
    _set(nn.Module, to=moved, cuda=_itself("cuda"))
    made = DataLoader.__init__

    @functools.wraps(made)
    def without_pinning(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.pin_memory = False

    _set(DataLoader, __init__=without_pinning)


def _without_cuda(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (CPU, *args[1:]) if args and is_cuda(args[0]) else args


def _without_cuda_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": CPU} if is_cuda(kwargs.get("device")) else kwargs


def _replace_constructors() -> None:
    """Let functions that make tensors take a CUDA device and mean the CPU."""

    def replaced(original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **_without_cuda_names(kwargs))

        scripted_as(make, original)
        return make

    for function in constructors():
        name = getattr(function, "__name__", "")
        if getattr(torch, name, None) is function:
            setattr(torch, name, replaced(function))
    for name in ("new_tensor", "new_zeros", "new_ones", "new_empty", "new_full"):
        method = replaced(getattr(Tensor, name))
        setattr(method, STANDS_FOR, getattr(Tensor, name))
        setattr(Tensor, name, method)


def _replace_autocast() -> None:
    made = torch.autocast.__init__

    @functools.wraps(made)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        made(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    _set(torch.autocast, __init__=init)

    class autocast(torch.autocast):  # the name that scripts write
        """``torch.cuda.amp.autocast``, on the CPU."""

        def __init__(
            self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True
        ) -> None:
            super().__init__("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    _set(torch.cuda.amp, autocast=autocast)
    _set(torch.cuda.amp.autocast_mode, autocast=autocast)

    scaler = torch.amp.GradScaler.__init__

    @functools.wraps(scaler)
    def on_the_cpu(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, "cpu" if is_cuda(device) else device, *args, **kwargs)

    _set(torch.amp.GradScaler, __init__=on_the_cpu)

    class GradScaler(torch.amp.GradScaler):
        """``torch.cuda.amp.GradScaler``, on the CPU."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu", *args, **kwargs)

    _set(torch.cuda.amp, GradScaler=GradScaler)
    _set(torch.cuda.amp.grad_scaler, GradScaler=GradScaler)
    for name in ("custom_fwd", "custom_bwd"):
        _replace_custom(name, getattr(torch.amp, name))


def _replace_custom(name: str, original: Any) -> None:
    """Let the decorators of a ``torch.autograd.Function``'s methods mean the CPU."""

    def decorator(function: Any = None, *, device_type: str, **kwargs: Any) -> Any:
        return original(function, device_type="cpu" if is_cuda(device_type) else device_type, **kwargs)

    def old(function: Any = None, **kwargs: Any) -> Any:
        return original(function, device_type="cpu", **kwargs)

    for module, made in ((torch.amp, decorator), (torch.cuda.amp, old), (torch.cuda.amp.autocast_mode, old)):
        _set(module, **{name: functools.wraps(original)(made)})


def _replace_data_parallel() -> None:
    made = DistributedDataParallel.__init__

    @functools.wraps(made)
    def init(
        self: Any,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        made(self, module, None, None, *args, **kwargs)

    _set(DistributedDataParallel, __init__=init)


def _replace_loading() -> None:
    load = torch.load

    @functools.wraps(load)
    def load_here(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or isinstance(map_location, dict) or is_cuda(map_location):
            map_location = CPU
        return load(f, map_location, *args, **kwargs)

    _set(torch, load=load_here)
