"""A step that runs without values: the model on the meta device, and operations as a device with values runs them.

On the meta device PyTorch takes the general path of attention, whose scores have memory, leaves autocast out, and
refuses grouped products in single precision. So attention is taken for the fused one that devices have, operations get
the types that autocast gives them, and a grouped product is as large as one matrix product of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.torch.pytorch.private import fused_attention, no_torch_function, tables_of
from weft.torch.tensors.pytree import map_tensors

DEVICES = ("cuda", "cpu")
"""Devices whose autocast counts: whichever is on."""
LOWER = frozenset(
    {
        F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        F.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm,
        torch.mv, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv,
        Tensor.addmm, Tensor.baddbmm,
    }
)  # fmt: skip
"""Functions that autocast computes in its own type; see PyTorch's "Autocast Op Reference"."""
SINGLE = frozenset(
    {
        F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div,
        F.binary_cross_entropy_with_logits, F.layer_norm, F.group_norm, torch.softmax, torch.log_softmax,
        Tensor.softmax, Tensor.log_softmax, torch.exp, torch.log, torch.pow, Tensor.exp, Tensor.log, Tensor.pow,
        torch.logsumexp, torch.norm, Tensor.norm, torch.cumsum, torch.sum, Tensor.sum, Tensor.__pow__,
    }
)  # fmt: skip
"""Functions that autocast of a GPU computes in single precision."""


GROUPED = frozenset(
    function for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if function
)
"""Products of rows with the matrix of their expert: the field's grouped GEMM."""

COUNTS = frozenset({torch.bincount, Tensor.bincount})
"""With ``minlength`` their result is taken to be that long: as when experts count their rows."""


OF_A_DEVICE: tuple[tuple[Any, str], ...] = (
    (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype"), (torch.amp, "is_autocast_available"),
    (torch.autocast, "__init__"),
)  # fmt: skip
"""Functions of autocast that take the kind of a device, ``x.device.type`` in a model's code."""


class AsWithValues(TorchFunctionMode):
    """Inside, functions of tensors without values take the paths that they take with values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOWER or func in SINGLE:
            device = _autocast_device()
            if device is not None and (func in LOWER or device == "cuda"):
                dtype = torch.get_autocast_dtype(device) if func in LOWER else torch.float32
                args, kwargs = map_tensors((args, kwargs), lambda tensor: _cast(tensor, dtype))
        if func is F.scaled_dot_product_attention:
            result = _attention(*args, **kwargs)
            if result is not None:
                return result
        if func in GROUPED and args[0].is_meta and (args[0].dim(), args[1].dim()) == (2, 3):
            return args[0] @ args[1][0]
        if func in COUNTS and args[0].is_meta:
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            if least:
                return torch.empty(least, dtype=torch.int64, device="meta")
        return func(*args, **kwargs)


def _autocast_device() -> str | None:
    """The device whose autocast is on."""
    return next((each for each in DEVICES if torch.is_autocast_enabled(each)), None)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    lower = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return tensor.to(dtype) if lower and tensor.device.type == "meta" else tensor


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """Fused attention, which keeps no scores; None where there is none, and for sharded tensors, which have rules."""
    alike = query.shape[-1] == value.shape[-1] and query.dtype == key.dtype == value.dtype
    learns = attn_mask is not None and attn_mask.requires_grad
    if (
        fused_attention is None
        or query.device.type != "meta"
        or any(type(each) not in (Tensor, nn.Parameter) for each in (query, key, value))
        or query.dim() not in (3, 4)
        or not alike
        or learns
    ):
        return None
    if query.dim() == 3:
        query, key, value = (each.unsqueeze(1) for each in (query, key, value))
        result = _attention(query, key, value, None, dropout_p, is_causal, scale)
        return None if result is None else result.squeeze(1)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(times, -3) for each in (key, value))
    with no_torch_function():
        return fused_attention(query, key, value, 0.0, is_causal, scale=scale)[0]


@contextmanager
def on_meta(root: nn.Module) -> Iterator[None]:
    """Inside, all parameters and buffers of the model are on the meta device.

    ``torch.jit.is_tracing()`` is True, for code that then reads no values. Autocast for the device of such a tensor is
    that of a device with values.
    """
    kept: list[tuple[dict[str, Any], str, Any]] = []
    twins: dict[int, Any] = {}
    for module in root.modules():
        for table in tables_of(module):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                kept.append((table, name, tensor))
                if id(tensor) not in twins:
                    twin = torch.empty_like(tensor, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
                    twins[id(tensor)] = twin
                table[name] = twins[id(tensor)]
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.jit, "is_tracing", lambda: True))
        for owner, name in OF_A_DEVICE:
            stack.enter_context(patch.object(owner, name, _for_values(getattr(owner, name))))
        try:
            yield
        finally:
            for table, name, tensor in kept:
                table[name] = tensor


def _for_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of autocast for the kind of device on which the tensors would have values."""

    def real(given: Any) -> Any:
        return (_autocast_device() or "cpu") if given == "meta" else given

    def answer(*args: Any, **kwargs: Any) -> Any:
        return function(*map(real, args), **{name: real(value) for name, value in kwargs.items()})

    return answer
