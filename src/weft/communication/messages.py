"""Values between ranks: a text and plain bytes. Nothing is unpickled unless both sides allow pickle.

pack, unpack      objects that scripts send: any number of tensors and arrays, as numbered pieces
encode, decode    what a step reads out of a tensor: one array, or a value without any
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.communication.serialise import FORMS, NUMBERS, Decoder, Encoder, Rules, named_dtype, type_name
from weft.errors import TransportError, UsageError
from weft.transport.channel import Message
from weft.transport.torch_dist import DTYPES
from weft.untrusted import shown, translated


@dataclass
class Packed:
    """An object ready to travel. ``pickled``: paths of what had to be pickled."""

    text: str
    blobs: list[Tensor]
    pickled: list[str]

    @property
    def sizes(self) -> list[int]:
        return [blob.numel() for blob in self.blobs]


def pack(
    value: Any, allow_pickle: bool = False, is_remote: Callable[[Tensor], bool] = lambda tensor: False
) -> Packed:
    """``value`` as text and blobs (uint8 tensors on the CPU, one dim).

    ``is_remote`` says of which tensors this rank has no data. Tensors arrive without their graph.
    Raises :class:`TransportError` that names the path and type of what cannot travel.
    """
    blobs: list[Tensor] = []

    def put(tensor: Tensor, path: str) -> list[Any]:
        if tensor.device.type == "meta" or is_remote(tensor):
            raise TransportError(
                f"{path} is a tensor without data on this rank: send it from the rank that owns it, or return it from "
                "the step"
            )
        content = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        blobs.append(content.view(-1).view(torch.uint8) if content.numel() else torch.empty(0).byte())
        return [len(blobs) - 1, str(tensor.dtype)[6:], list(tensor.shape), tensor.device.type == "cpu"]

    encoder = Encoder(MESSAGES, put, allow_pickle)
    text = json.dumps(encoder.encode(value, "the object"))
    return Packed(text, blobs, encoder.pickled)


def unpack(text: str, blobs: Sequence[Tensor], device: torch.device, allow_pickle: bool = False) -> Any:
    """The object that :func:`pack` was given. Tensors that were on a GPU come to ``device``, the others to the CPU."""

    def take(where: Any) -> Tensor:
        number, name, shape, was_on_host = where
        if type(number) is not int or not 0 <= number < len(blobs):
            raise ValueError(f"it has {len(blobs)} pieces, and no {shown(number)}")
        raw, dtype = blobs[number], named_dtype(name)
        if dtype not in DTYPES:
            raise ValueError(f"tensors of dtype {name} do not travel")
        tensor = (raw.view(dtype) if raw.numel() else torch.empty(0, dtype=dtype)).view(shape)
        return tensor if was_on_host else tensor.to(device)

    with translated("what arrived cannot be read as an object", MESSAGES.damage, MESSAGES.cause):
        return Decoder(MESSAGES, take, allow_pickle).decode(json.loads(text))


def encode(value: Any, name: str) -> tuple[str | None, Tensor | None]:
    """(text, payload) for a value that ``name`` has read out of a tensor."""
    if isinstance(value, Tensor):
        return None, value
    if _is_numpy(value):
        return None, torch.as_tensor(value)
    try:
        packed = pack(value)
        if not packed.blobs:
            return packed.text, None
    except TransportError:
        pass
    raise UsageError(
        f"{name} reads a {type(value).__qualname__} out of a tensor, which cannot be sent to the other ranks; "
        "use .item() or .tolist()"
    )


def decode(message: Message) -> Any:
    """The value that :func:`encode` was given; arrays come back as NumPy arrays."""
    if message.text is None:
        numpy = sys.modules.get("numpy")
        return message.payload if numpy is None else message.payload.cpu().numpy()
    return unpack(message.text, (), torch.device("cpu"))


def _is_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "dtype")


def _travels(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return is_plain and tensor.layout == torch.strided and tensor.dtype in DTYPES


def _fault(value: Any) -> str:
    if isinstance(value, Tensor):
        return (
            f"is a {type(value).__qualname__} of dtype {value.dtype} and layout {value.layout}: only plain dense "
            "tensors travel, use .to_dense() or .dequantize()"
        )
    if _is_numpy(value):
        return f"is a NumPy array of dtype {value.dtype}, which cannot travel"
    return f"is of type {type_name(value)}, which cannot travel"


MESSAGES = Rules(
    name="this message",
    tags=frozenset(FORMS),
    written_as={},
    exact=True,
    inline_bytes=False,
    arrays=re.compile(rf"{NUMBERS.pattern}|[<>|][SU]\d{{1,9}}|[<>][mM]8\[\w{{1,8}}\]"),
    takes=_travels,
    fault=_fault,
    remedy="JSON's values, tuples, sets, bytes, tensors, NumPy arrays and dataclasses travel; turn it into one of "
    "them, or give allow_pickle=True on both sides if every rank is to be trusted",
    refusal=TransportError,
    damage=TransportError,
    cause="do all ranks run the same version of weft?",
)
