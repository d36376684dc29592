"""Values of a script in a checkpoint: JSON, and tensors by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.communication.serialise import FORMS, NUMBERS, Decoder, Encoder, Rules, type_name
from weft.errors import CheckpointError, UsageError

FILES = Rules(
    name="this checkpoint",
    tags=frozenset(FORMS) - {"$bytearray", "$complex", "$dataclass", "$frozenset", "$ordered", "$size"},
    written_as={
        "$bytearray": "$bytes", "$default": "$dict", "$frozenset": "$set", "$ordered": "$dict", "$size": "$tuple",
    },
    exact=False,
    inline_bytes=True,
    arrays=NUMBERS,
    takes=lambda tensor: True,
    fault=lambda value: f"is a {type_name(value)}",
    remedy="a checkpoint holds numbers, texts, lists, dicts, tensors and NumPy arrays; convert the value (objects with "
    "state_dict() go into also=), or pass allow_pickle=True",
    refusal=UsageError,
    damage=CheckpointError,
)  # fmt: skip


def encoder(tensors: dict[str, Tensor], prefix: str, allow_pickle: bool = False) -> Encoder:
    """An encoder whose tensors go into ``tensors``, under paths that begin with ``prefix``."""

    def put(tensor: Tensor, path: str) -> str:
        where = f"{prefix}/{len(tensors)}"
        tensors[where] = tensor.detach()
        return where

    return Encoder(FILES, put, allow_pickle)


def decoder(read: Callable[[str], Tensor], allow_pickle: bool | str = False) -> Decoder:
    """A decoder for a checkpoint, of which ``read`` gives the tensor of a path.

    ``allow_pickle``: whether pickled objects may run their code; "leave" puts an ``Unread`` in their place.
    """

    def take(where: Any) -> Tensor:
        return read(where)

    return Decoder(FILES, take, allow_pickle)
