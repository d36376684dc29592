"""Python values between ranks: JSON, or a tensor for arrays. No pickle."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.transport.channel import Message


def encode(value: Any, name: str) -> tuple[str | None, Tensor | None]:
    """(text, payload) of a value that ``name`` read out of a tensor."""
    if isinstance(value, Tensor):
        return None, value
    if isinstance(value, complex):
        return json.dumps({"complex": [value.real, value.imag]}), None
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return None, torch.as_tensor(value)
    try:
        return json.dumps({"value": value}), None
    except TypeError:
        raise UsageError(
            f"{name} reads a {type(value).__qualname__} out of a tensor, which cannot be told to the other ranks; "
            "use .item() or .tolist()"
        ) from None


def decode(message: Message) -> Any:
    """What :func:`encode` was given; arrays come back as NumPy arrays."""
    if message.text is None:
        numpy = sys.modules.get("numpy")
        return message.payload if numpy is None else message.payload.cpu().numpy()
    content = json.loads(message.text)
    return complex(*content["complex"]) if "complex" in content else content["value"]
