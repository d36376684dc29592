"""A CUDA device without a GPU: plain tensors of `cuda:0` whose bytes are the host's, for a PyTorch that has no CUDA.

They are as strict as those of a GPU. An operation on tensors of both devices is an error, but for a CPU's 0-dim ones;
so are views of their memory from the host. `WAITS` counts where a real GPU would make the host wait.

A tensor changes its device on the way through DLPack, which copies nothing. PyTorch's dispatcher finds no kernel for
CUDA and takes the fallback here, which gives the CPU's kernel aliases of the same bytes. Autograd, autocast and
all that stands above kernels are PyTorch's own.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CPU, CUDA = 1, 2
"""Kinds of devices in DLPack."""
KEY = torch._C.DispatchKey.CPU
WITHOUT = {"aten::_fused_sdp_choice": 0} | dict.fromkeys(
    ("aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss"), False
)
"""Questions before operations that GPUs alone have, and the answers that lead to others."""
EXPLICIT = "copy_", "empty_strided", "empty.memory_format"
"""Operations that do not come to a fallback: one has a kernel for all devices, `torch.tensor` calls the others below
modes of `torch.utils._python_dispatch`, where PyTorch finds no fallbacks in Python."""
PLACES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations whose indices are moved to the device."""
SOURCE, OWN = str(Path(torch.__path__[0]).parent), str(Path(__file__).with_name("emulated"))


class _Waits:
    """Where the host waited for the device: by kind and by the function that asked."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def note(self, kind: str) -> None:
        self.found[f"{kind} in {_function()}"] += 1


WAITS = _Waits()


def _function() -> str:
    """The innermost function that is neither PyTorch's nor of what emulates a GPU."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if not file.startswith((SOURCE, OWN)):
            return f"{Path(file).name} {frame.f_code.co_name}"
    return "a thread of PyTorch's own"


PINNED: set[int] = set()
"""The addresses of pinned host memory."""


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Managed(ctypes.Structure):
    """The beginning of a DLTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _as_on(tensor: Tensor, kind: int) -> Tensor:
    """The same bytes, as a tensor of another device."""
    capsule = torch._C._to_dlpack(tensor)
    managed = _Managed.from_address(_pointer(capsule, b"dltensor"))
    managed.kind, managed.index = kind, 0
    return torch._C._from_dlpack(capsule)


def on_host(tensor: Tensor) -> Tensor:
    return _as_on(tensor, CPU) if tensor.is_cuda else tensor


def on_device(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        return tensor
    made = _as_on(tensor, CUDA)
    FREED.discard(made.untyped_storage()._cdata)
    return made


FREED: set[int] = set()
"""Storages without bytes, as FSDP2 leaves them until it gathers again; here they have wrong ones."""


def _check(op: Any, given: list[Tensor]) -> None:
    devices = {str(t.device) for t in given if t.dim() or t.is_cuda}
    if len(devices) > 1 and op._schema.name not in PLACES:
        shapes = [(str(t.device), list(t.shape)) for t in given]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {op} got {shapes}")


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [t for each in given for t in _tensors(each)] if isinstance(given, (list, tuple)) else []


def _map(function: Callable[[Tensor], Tensor], given: Any) -> Any:
    """An operation's arguments or results, with what the function makes of each tensor."""
    if isinstance(given, Tensor):
        return function(given)
    if isinstance(given, (list, tuple)):
        return type(given)([_map(function, each) for each in given])
    return given


def _copy(op: Any, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if into.device != source.device:
        pinned = address(into if source.is_cuda else source) in PINNED
        if not (non_blocking and pinned) and not (into.is_cuda and non_blocking):
            WAITS.note("copy to the host" if source.is_cuda else "copy to the device")
    with torch.no_grad():
        on_host(into).copy_(on_host(source))
    return into


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name
    if op.is_view or name in ("aten::set_", "aten::resize_"):
        return op._op_dk(KEY, *args, **kwargs)
    if name in WITHOUT:
        return WITHOUT[name]
    if name == "aten::copy_":
        return _copy(op, *args, **kwargs)
    given = _tensors([args, list(kwargs.values())])
    _check(op, given)
    masks = name == "aten::_index_put_impl_" and any(t.dtype == torch.bool for t in _tensors(args[1]))
    if masks or {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags):
        WAITS.note(name.removeprefix("aten::"))
    kwargs.pop("pin_memory", None)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    inputs = {id(tensor) for tensor in _tensors(args)}
    outs = [kwargs[each.name] for each in op._schema.arguments if each.is_out and each.name in kwargs]
    outs = [out for out in outs if isinstance(out, Tensor) and id(out) not in inputs]
    lent: dict[int, Tensor] = {}
    owners: dict[int, Tensor] = {}

    def lend(tensor: Tensor) -> Tensor:
        if id(tensor) not in lent:
            is_out = any(tensor is out for out in outs)
            made = torch.empty(0, dtype=tensor.dtype) if is_out else on_host(tensor)
            lent[id(tensor)], owners[id(made)] = made, tensor
        return lent[id(tensor)]

    kinds = {t.dtype for t in given if t.is_floating_point()}
    exact = (
        functools.reduce(torch.promote_types, kinds) if kinds else None
    )  # a number has the type of the others
    args = [
        torch.tensor(value, dtype=exact if isinstance(value, float) else None)
        if isinstance(value, (int, float)) and str(each.type) == "Tensor"
        else _map(lend, value)
        for value, each in zip(args, op._schema.arguments, strict=False)
    ]  # numbers that PyTorch had made tensors of come as numbers
    kwargs = {name: _map(lend, value) for name, value in kwargs.items()}
    with torch.no_grad(), _drawing(op):
        found = op(*args, **kwargs)
    for out in outs:
        made = lent[id(out)]
        if made.shape == out.shape:
            on_host(out).copy_(made)
        else:
            _put(out, on_device(made))
    return _map(lambda t: owners[id(t)] if id(t) in owners else on_device(t), found)


def _through_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """NCCL is gloo, on the same bytes."""
    owners: dict[int, Tensor] = {}

    def lend(tensor: Tensor) -> Tensor:
        made = on_host(tensor)
        owners[id(made)] = tensor
        return made

    args, kwargs = _map(lend, args), kwargs
    return _map(lambda t: owners.get(id(t), t), op(*args, **kwargs))


def _put(into: Tensor, made: Tensor) -> None:
    place = made.storage_offset(), made.shape, made.stride()
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk(KEY, into, made.untyped_storage(), *place)


class _drawing:
    """Random numbers come from the device's own generator."""

    def __init__(self, op: Any) -> None:
        self.draws = torch.Tag.nondeterministic_seeded in op.tags

    def __enter__(self) -> None:
        if self.draws:
            _lock.acquire()
            self.before = torch.default_generator.get_state()
            torch.default_generator.set_state(GENERATOR.get_state())

    def __exit__(self, *_: object) -> None:
        if self.draws:
            GENERATOR.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(self.before)
            _lock.release()


_lock = threading.RLock()
GENERATOR = torch.Generator()


def _guard() -> None:
    """CUDA's device guard, which is PyTorch's own for devices that are not there: it takes the place of a guard that
    counts no devices. And PyTorch's C++ hears from its hooks that there is CUDA."""
    folder = Path(torch.__path__[0])
    guards = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(str(folder / "lib/libc10.so")), _GUARDS)
    methods = (ctypes.c_void_p * 64)(*[_address_of(_NOTHING)] * 64)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
    guards[1] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()

    find = ctypes.CDLL(str(folder / "lib/libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    find.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(find())
    hooks = (ctypes.c_void_p * 98)()
    ctypes.memmove(
        hooks, (table.value or 0) - 16, 8 * 66
    )  # less than there is, up to which nothing else is called
    for method in METHODS:
        hooks[2 + method] = _address_of(_TRUE)
    table.value = ctypes.addressof(hooks) + 16
    _libraries.append(hooks)


def _address_of(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


METHODS = 2, 3, 4
"""The places of `isBuilt`, `isAvailable` and `hasPrimaryContext`, behind a destructor, which takes two."""
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_NOTHING = ctypes.CFUNCTYPE(ctypes.c_size_t)(lambda: 0)
_TRUE = ctypes.CDLL(None).__libc_current_sigrtmin
"""A function of C that needs neither arguments nor Python, and never gives zero."""
_libraries: list[Any] = []


def install() -> None:
    """From now on tensors may be on `cuda:0`."""
    _guard()
    fallback = torch.library.Library("_", "IMPL", "CUDA")
    fallback.fallback(_fallback)
    aten = torch.library.Library("aten", "IMPL", "CUDA")
    for name in EXPLICIT:
        operation, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, operation), overload or "default")
        aten.impl(name, partial(_fallback, op))
    c10d = torch.library.Library("c10d", "IMPL", "CUDA")
    for name in torch._C._dispatch_get_all_op_names():
        space, _, short = name.partition("::")
        if space == "c10d" and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            c10d.impl(
                short, partial(_through_host, getattr(torch.ops.c10d, short).default), allow_override=True
            )
    _libraries.extend((fallback, aten, c10d))
