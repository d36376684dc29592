"""PyTorch's functions, sorted into sets by what the glue mode needs to know about them.

``METADATA``   answered from shape, dtype and the like: every rank answers for itself
``READS``      give a Python value out of a tensor's data: the owner sends it to all
``LIKE``       use only shape, dtype and device of their tensor: replicated
``VALUE_FREE`` arithmetic whose result's shape does not depend on numbers among the arguments
``SHAPED_BY_FLOATS`` functions whose result's shape depends on numbers that are not whole
``SHAPED_BY_TENSORS`` functions whose result's shape depends on the values of a tensor that is not their first argument
``RESHAPED``   change the shape of the tensor itself
``REPLACED``   give the tensor other memory
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.torch.pytorch.private import has_memory

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "names", "requires_grad", "is_leaf", "grad_fn", "is_cuda",
    "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_nested", "itemsize", "nbytes",
    "_version", "_base", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "is_ipu", "is_vulkan", "is_maia",
    "is_mtia", "retains_grad", "output_nr", "name", "_backward_hooks", "_post_accumulate_grad_hooks", "volatile",
    "_cdata", "grad_dtype",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed",
    "get_device", "is_contiguous", "stride", "storage_offset", "__len__", "__hash__", "is_inference", "ndimension",
    "has_names", "register_hook", "retain_grad", "requires_grad_", "is_conj", "is_neg", "is_pinned", "is_shared",
    "_is_view", "dim_order", "is_same_size", "register_post_accumulate_grad_hook", "is_coalesced", "dense_dim",
    "sparse_dim", "is_distributed", "__dir__", "__class_getitem__", "_is_zerotensor", "is_set_to",
)  # fmt: skip
_FUNCTIONS = (
    "is_floating_point", "is_complex", "numel", "is_tensor", "result_type", "is_same_size", "is_conj", "is_neg",
    "is_inference", "is_signed",
)  # fmt: skip
_READS = (
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
    "__contains__", "equal", "allclose", "is_nonzero", "__repr__", "__format__", "__str__",
)  # fmt: skip
_LIKE = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided")
_LIKE_FUNCTIONS = (
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
)  # fmt: skip
_VALUE_FREE = (
    "add", "sub", "mul", "div", "true_divide", "pow", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__truediv__", "__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__", "__iadd__", "__isub__",
    "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_", "__eq__", "__ne__", "__lt__", "__le__",
    "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt", "ge", "masked_fill", "masked_fill_", "clamp", "clamp_", "fill_",
    "where", "rsub", "multiply", "divide", "subtract",
)  # fmt: skip
_IN_PLACE = (
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__idiv__", "__delitem__",
)  # fmt: skip


def _getters(names: tuple[str, ...]) -> set[Any]:
    found = set()
    for name in names:
        attribute = getattr(Tensor, name, None)
        getter = getattr(attribute, "__get__", None)
        if getter is not None:
            found.add(getter)
    return found


STANDS_FOR = "_weft_stands_for"
"""Attribute of a function that was put in the place of a method of tensors: the method. PyTorch looks methods up by
name, so what overrides them gets the replacement."""
PLAIN_APPLY: Any = inspect.getattr_static(torch.autograd.Function, "apply")
"""PyTorch's own ``Function.apply``: a job's first step puts another one in its place."""


def named(owners: tuple[Any, ...], names: tuple[str, ...]) -> set[Any]:
    """The functions of these names, as PyTorch has them: where weft's own stands for one, that one."""
    found = (getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))
    return {getattr(function, STANDS_FOR, function) for function in found}


METADATA: frozenset[Any] = frozenset(
    _getters(_PROPERTIES)
    | named((Tensor,), _METHODS)
    | named((torch,), _FUNCTIONS)
    | {Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
)
DEVICE_GETTER = Tensor.device.__get__
REQUIRES_GRAD_GETTER = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
PLACE_GETTERS: dict[Any, Callable[[torch.device], Any]] = {
    DEVICE_GETTER: lambda device: device,
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.get_device: lambda device: -1 if device.index is None else device.index,
}
READS: frozenset[Any] = frozenset(named((Tensor, torch), _READS))
LIKE: frozenset[Any] = frozenset(named((Tensor,), _LIKE) | named((torch,), _LIKE_FUNCTIONS))
VALUE_FREE: frozenset[Any] = frozenset(named((Tensor, torch), _VALUE_FREE))
SHAPED_BY_FLOATS: frozenset[Any] = frozenset(
    named(
        (torch.nn.functional,), ("interpolate", "upsample", "fractional_max_pool2d", "fractional_max_pool3d")
    )
)
SHAPED_BY_TENSORS: frozenset[Any] = frozenset(
    named(
        (Tensor, torch),
        ("tensor_split", "repeat_interleave", "split", "split_with_sizes", "_pack_padded_sequence"),
    )
    | {torch.nn.utils.rnn.pack_padded_sequence, torch.nn.utils.rnn.pad_packed_sequence}
)
TYPE_NAME = Tensor.type
BACKWARD: frozenset[Any] = frozenset((Tensor.backward, torch.autograd.backward))
GRADIENTS: frozenset[Any] = frozenset(_getters(("grad", "_grad")))
GRADIENT_GETTER = Tensor.grad.__get__  # type: ignore[union-attr]
GRADIENT_SETTER = Tensor.grad.__set__  # type: ignore[union-attr]
AUTOGRAD: frozenset[Any] = BACKWARD | GRADIENTS | {torch.autograd.grad, GRADIENT_SETTER}
VIEWS: frozenset[Any] = frozenset(
    named(
        (Tensor, torch),
        (
            "view", "reshape", "transpose", "permute", "__getitem__", "expand", "expand_as", "squeeze", "unsqueeze",
            "chunk", "split", "tensor_split", "narrow", "select", "t", "unbind", "flatten", "unflatten", "view_as",
            "detach", "swapaxes", "swapdims", "movedim", "moveaxis", "diagonal", "as_strided", "unfold", "contiguous",
            "to", "float", "half", "bfloat16", "double", "type_as", "cpu", "cuda", "reshape_as", "broadcast_to",
            "real", "imag", "view_as_real", "view_as_complex", "hsplit", "vsplit", "dsplit", "ravel", "adjoint",
            "positive", "split_with_sizes", "unsafe_split", "unsafe_chunk", "atleast_1d", "atleast_2d", "atleast_3d",
            "broadcast_tensors", "bool", "int", "long", "short", "char", "byte",
        ),
    )
    | named(
        (torch.nn.functional,),
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    )
    | _getters(("T", "mT", "H", "mH", "data", "real", "imag"))
)  # fmt: skip


RESHAPED: frozenset[Any] = frozenset(
    named(
        (Tensor, torch),
        ("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"),
    )
)
DATA_SETTER = Tensor.data.__set__  # type: ignore[attr-defined]
REPLACED: frozenset[Any] = frozenset({DATA_SETTER} | named((Tensor, torch), ("resize_", "resize_as_")))


def targets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that ``func`` writes into; none if it does not work in place."""
    target = written(func, args, kwargs)
    several = target if isinstance(target, (list, tuple)) else (target,)
    return [one for one in several if isinstance(one, Tensor)]


def memory_written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Those of :func:`targets` that have one piece of memory each."""
    return list(filter(has_memory, targets(func, args, kwargs)))


def is_for_each(func: Callable[..., Any]) -> bool:
    """True if ``func`` is an operation on lists of tensors, one after the other."""
    return getattr(func, "__name__", "").startswith("_foreach_")


def one_by_one(
    args: tuple[Any, ...], kwargs: dict[str, Any], numbers: list[list[int]]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of such an operation for some of its tensors each."""
    count = len(args[0])

    def at(argument: Any, chosen: list[int]) -> Any:
        listed = isinstance(argument, (list, tuple)) and len(argument) == count
        return [argument[number] for number in chosen] if listed else argument

    return [
        (tuple(at(arg, chosen) for arg in args), {key: at(arg, chosen) for key, arg in kwargs.items()})
        for chosen in numbers
    ]


def _works_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or name == "__set__" or (name.endswith("_") and not name.endswith("__"))


_in_place_names: dict[Any, bool] = {
    func: _works_in_place(func)
    for home in (torch, torch.nn.functional, Tensor, *Tensor.__mro__[1:-1])
    for func in vars(home).values()
    if inspect.isroutine(func)
}
"""Known before a compiler looks for them, which follows no such question."""


def written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that ``func`` writes into, if it works in place; several, if that is one of ``torch._foreach_...``."""
    known = _in_place_names.get(func)
    if known is None:
        known = _in_place_names[func] = _works_in_place(func)
    if known or kwargs.get("inplace"):
        return args[0] if args else kwargs.get("input")
    out = kwargs.get("out")
    return out if isinstance(out, Tensor) else None
