"""The state of a rank as bytes in memory, for the rank of another replica that has the same part of the model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.communication.serialise import named_dtype
from weft.torch.checkpoint import named_state
from weft.torch.checkpoint.tensor_files import buffer_of, stage
from weft.torch.model import DistributedModel
from weft.torch.session.session import Session
from weft.torch.tensors import saved_values

_LENGTH = struct.Struct("<Q")


class HandOver:
    """Gives and takes weights, buffers, states of optimizers, and those of the objects in ``also``.

    Args:
        session: That of this rank.
        model: The model, which is split when the state is asked for.
        optimizers: Its optimizers.
        also: Objects with ``state_dict()`` and ``load_state_dict()``, by name.
    """

    def __init__(
        self, session: Session, model: DistributedModel, optimizers: Sequence[Any], also: Mapping[str, Any]
    ) -> None:
        self._session, self._model, self._optimizers, self._also = session, model, optimizers, also

    def give(self, write: Callable[[memoryview], None]) -> None:
        """Write the state: a header with what is no tensor, and the tensors."""
        tensors = {names[0]: value for names, value in self._weights()}
        states: dict[str, Tensor] = {}
        encoder = saved_values.encoder(states, "states")
        values = {
            "optimizers": [
                encoder.encode(named_state.own_state(each), "the optimizer's state")
                for each in self._optimizers
            ],
            "extra": encoder.encode(named_state.named_state(self._model.module)[2], "the extra states"),
            "also": {
                name: encoder.encode(value.state_dict(), f"also[{name!r}]")
                for name, value in self._also.items()
            },
        }
        kept = [stage(each, copy=False) for each in (tensors, states)]
        described = [{name: [str(t.dtype)[6:], list(t.shape)] for name, t in each.items()} for each in kept]
        header = json.dumps([values, *described]).encode()
        write(memoryview(_LENGTH.pack(len(header)) + header))
        for tensor in (tensor for each in kept for tensor in each.values()):
            write(buffer_of(tensor))

    def take(self, content: bytearray) -> None:
        """Put what :meth:`give` has made on another rank in the place of this one's state."""
        (length,) = _LENGTH.unpack_from(content)
        at = _LENGTH.size + length
        values, *described = json.loads(bytes(content[_LENGTH.size : at]))
        found: list[dict[str, Tensor]] = []
        for each in described:
            tensors = {}
            for name, (dtype, shape) in each.items():
                tensors[name], at = _tensor(content, at, named_dtype(dtype), shape)
            found.append(tensors)
        weights, states = found
        decoder = saved_values.decoder(states.__getitem__)
        with torch.no_grad():
            for names, target in self._weights():
                target.copy_(weights[names[0]])
        for each in self._model.optimizers:
            each.forget_masters()
        torch.clear_autocast_cache()
        named_state.load_extra(self._session, self._model, decoder.decode(values["extra"]))
        for optimizer, saved in zip(self._optimizers, values["optimizers"], strict=True):
            named_state.load_optimizer(optimizer, *decoder.decode(saved))
        for name, target in self._also.items():
            target.load_state_dict(decoder.decode(values["also"][name]))

    def _weights(self) -> list[tuple[list[str], Tensor]]:
        return list(named_state.local_targets(self._session, self._model))


def _tensor(content: bytearray, at: int, dtype: torch.dtype, shape: Sequence[int]) -> tuple[Tensor, int]:
    """A tensor that begins at a byte, in memory of its own, and the byte behind it."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype), at
    flat = torch.frombuffer(content, dtype=torch.uint8, count=size, offset=at).clone()
    return flat.view(dtype).reshape(shape), at + size
