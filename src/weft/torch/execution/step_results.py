"""The results of a step's microbatches, on their way to every rank.

A large tensor leaves as soon as its microbatch has run, while others still do. Small ones, losses mostly, wait until
all have: one message for all of them costs each rank what one for each of them would.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import DivergenceError, UsageError
from weft.torch.calls.call_signature import after_writes
from weft.torch.execution.program import Program
from weft.torch.execution.tape import check_stale
from weft.torch.execution.value import Value
from weft.torch.session.differing_calls import END, CallCheck
from weft.torch.tensors.pytree import map_tensors
from weft.torch.tensors.shards import used
from weft.transport.channel import OUTPUT, Key, Message
from weft.transport.tensor_bytes import dense

SMALL_BYTES = 4096
"""Up to this size a message costs more than what it carries."""


class Outside(torch.autograd.Function):
    """The end of a step's graph for what is outside of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UsageError(
            "a backward pass from outside of the step comes to what the step returned, but the model is split, and the "
            "graph lies on several ranks: compute the loss in the function that @weft.step decorates, and call "
            "model.backward(loss) there"
        )


class Returned:
    """The results of one step of ``microbatches``; with ``detach`` their tensors carry no graph.

    Without it they need a gradient where they would, but going backward from them is refused, on every rank alike.
    ``calls``: what compares the ranks' calls at the end.
    """

    def __init__(self, microbatches: int, detach: bool, calls: CallCheck) -> None:
        self._calls = calls
        self._detach = detach
        self._left = microbatches
        self._small: list[list[tuple[int, Tensor]]] = [[] for _ in range(microbatches)]
        self._arrived: dict[int, Tensor] = {}

    def deliver(self, program: Program, result: Any) -> Any:
        """A microbatch's result: with data, but for small tensors of other ranks; see :meth:`whole`."""
        program.log.append(END)
        result = map_tensors(result, lambda tensor: self._send_or_receive(program, tensor), attributes=True)
        self._left -= 1
        if not self._left:
            self._calls.end(program.microbatch)
            self._exchange(program)
        return result

    def whole(self, results: Sequence[Any]) -> list[Any]:
        """The results of all microbatches, once all have been delivered."""
        if not self._arrived:
            return list(results)
        return [map_tensors(result, self._whole, attributes=True) for result in results]

    def _whole(self, tensor: Tensor) -> Tensor:
        arrived = self._arrived.get(id(tensor))
        return tensor if arrived is None else self._ended(arrived, tensor)

    def _ended(self, data: Tensor, tensor: Tensor) -> Tensor:
        """``data`` of a result as every rank gives it to the script, wherever the data come from."""
        if self._detach or not tensor.requires_grad:
            return data
        ended: Tensor = Outside.apply(data.detach().requires_grad_())  # type: ignore[no-untyped-call]
        return ended

    def _send_or_receive(self, program: Program, tensor: Tensor) -> Tensor:
        value = program.value_of(tensor)
        local = used(self._data(program, tensor, value))
        if value is not None:
            check_stale(value, "the step's result")
        if value is not None and goes_with_others(tensor, value):
            kept = local.detach() if value.owner == program.rank else tensor  # not the graph
            self._small[program.microbatch.index].append((value.owner, kept))
        elif value is not None:
            key = program.tape.key(OUTPUT, value.number)
            if value.owner != program.rank:
                received: Tensor = program.microbatch.receive(
                    value.owner, key, "a tensor that the step returns"
                ).payload
                return self._ended(received, tensor)
            for peer in program.pipeline.others():
                program.pipeline.channel.send(peer, Message(key, local.detach()))
        if value is None or value.owner != program.rank:
            return local.detach() if self._detach and value is None else local
        return local.detach() if self._detach else self._ended(local, local)

    @staticmethod
    def _data(program: Program, tensor: Tensor, value: Value | None) -> Tensor:
        if value is None:
            return tensor
        return program.tape.whole(value, tensor) if value.owner == program.rank else value.data(tensor)

    def _exchange(self, program: Program) -> None:
        """Send this rank's small tensors and receive those of the others, in the order of the microbatches."""
        by_owner: dict[int, list[Tensor]] = {}
        for owner, tensor in itertools.chain.from_iterable(self._small):
            by_owner.setdefault(owner, []).append(tensor)
        key = Key(OUTPUT, program.step, 0, 0)
        own = by_owner.pop(program.rank, [])
        if own:
            packed = torch.cat([dense(each).contiguous().view(-1).view(torch.uint8) for each in own])
            for peer in program.pipeline.others():
                program.pipeline.channel.send(peer, Message(key, packed))
        for owner, expected in by_owner.items():
            packed = program.microbatch.receive(owner, key, "the small tensors that the step returns").payload
            sizes = [each.nbytes for each in expected]
            if packed.numel() != sum(sizes):
                raise DivergenceError(
                    f"pipeline rank {owner} returns tensors of {packed.numel()} bytes from the step, where this rank "
                    f"expects {sum(sizes)}: every rank has to return the same"
                )
            for each, data in zip(expected, packed.split(sizes), strict=True):
                self._arrived[id(each)] = data.clone().view(each.dtype).view(after_writes(each).shape)


def goes_with_others(tensor: Tensor, value: Value) -> bool:
    """True if a tensor waits for the other small ones and travels with them. Every rank must answer alike.

    Parameters have their sizes on their own rank only, and writing into a tensor may have changed its shape there.
    """
    return tensor.nbytes <= SMALL_BYTES and tensor._weft_owner is None and not value.alias.version  # type: ignore[attr-defined]
