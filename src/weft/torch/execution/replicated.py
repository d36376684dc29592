"""Gradients of what every rank computes for itself: inputs, trainable tensors outside of the model, and what glue makes
of them.

Where such a *replicated* tensor enters a call that runs on one rank only, that rank alone knows what comes back:

    t = scale.exp()          every rank, each with a graph of its own
    y = model(x) * t         rank 1: t is a leaf there
    model.backward(loss)     rank 1 sends all others the gradient of that leaf; then every rank goes backward
                             through its own graph of t, and has the same scale.grad

All ranks run the same program, so each knows which ranks a tensor was used on: nobody asks. What they add up they add
in the same order, so the gradients are equal to the last bit, and optimizers on all ranks take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.errors import UsageError
from weft.runtime.microbatch import Microbatch
from weft.torch.backward.autograd import graph_nodes, leaf_of, refuse_outside
from weft.torch.execution.value import Segment, Value
from weft.torch.pytorch.private import version
from weft.transport.channel import Channel, Key, Message


class Tape(Protocol):
    """The parts of a microbatch's tape that replicated tensors need."""

    rank: int
    channel: Channel
    microbatch: Microbatch
    segments: list[Segment]

    def grad_key(self, value: Value, version: int) -> Key: ...


def is_made_here(tape: Tape, tensor: Tensor) -> bool:
    """True if only this rank has the tensor, because it was computed from tensors that are this rank's alone."""
    leaves = {id(leaf) for segment in tape.segments for leaf, _ in segment.living()}
    sources = (leaf_of(node) for node in graph_nodes([tensor]))
    return any(
        one is not None and (id(one) in leaves or getattr(one, "_weft_owner", None) is not None)
        for one in sources
    )


EVERYWHERE = -1
"""The owner of a replicated tensor's value."""


class Replicated:
    """The replicated tensors of one microbatch that need a gradient.

    Args:
        tape: The microbatch's tape.
        others: The other ranks of the pipeline.
        copies: Whether there are replicas on other data. Trainable parameters are refused then: only those
            of the model are averaged over the copies.
    """

    def __init__(self, tape: Tape, others: Sequence[int], copies: bool = False) -> None:
        self._tape = tape
        self._others = others
        self._copies = copies
        self._used: dict[tuple[int, int], tuple[Tensor, Value]] = {}
        """By id and version, for writing in place makes another tensor of it."""
        self._seeds: list[tuple[GradientEdge, Tensor]] = []

    def use(self, tensor: Tensor, rank: int, new_value: Callable[[], Value], written: bool = False) -> Value:
        """The value of a tensor that a call on ``rank`` uses.

        ``written``: the call has written into the tensor, which is that rank's alone by now; the value is that of the
        tensor as it was before.
        """
        key = id(tensor), -1 if written else version(tensor)
        if key not in self._used:
            self._refuse_parameters(tensor)
            if is_made_here(self._tape, tensor):
                raise UsageError(
                    f"a tensor of shape {list(tensor.shape)} computed on one partition was used in code that runs on "
                    "every rank: its module stored it in an attribute or a list. Return it from forward()"
                )
            self._used[key] = tensor, new_value()
            self._used[key][1].edge = get_gradient_edge(tensor)
        self._used[key][1].sent[rank] = 0
        return self._used[key][1]

    def value_of(self, tensor: Tensor) -> Value | None:
        """The value of a tensor that some rank has used."""
        found = self._used.get((id(tensor), version(tensor)))
        return None if found is None else found[1]

    def used(self) -> list[tuple[Tensor, Value]]:
        """All tensors that were used, with their values, in the order of the program."""
        return list(self._used.values())

    def seed(self, tensor: Tensor, grad: Tensor) -> None:
        """Let the next backward pass begin at this tensor, too."""
        self._refuse_parameters(tensor)
        self._seeds.append((get_gradient_edge(tensor), grad))

    def _refuse_parameters(self, tensor: Tensor) -> None:
        if self._copies:
            refuse_outside([tensor])

    def gradients(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where gradients enter the graph that every rank has, and these gradients, equal on every rank."""
        tape = self._tape
        values = [value for _, value in self._used.values()]
        for value in values:
            if tape.rank in value.sent:
                for peer in self._others:
                    tape.channel.send(peer, Message(tape.grad_key(value, 0), value.grad))
        roots, self._seeds = self._seeds, []
        for value in values:
            for rank in sorted(value.sent):
                if rank == tape.rank:
                    grad = value.grad
                else:
                    key = tape.grad_key(value, 0)
                    grad = tape.microbatch.receive(rank, key, "the gradient of a tensor of all ranks").payload
                if grad is not None and value.edge is not None:
                    roots.append((value.edge, grad))
            value.grad = None
        return [edge for edge, _ in roots], [grad for _, grad in roots]
