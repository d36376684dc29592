"""Shares of an optimizer's state: for each parameter, one replica keeps the state and updates the parameter.

This is stage 1 of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5.1), with whole parameters instead of slices of
a flat tensor. So every optimizer of ``torch.optim`` computes the same as without sharding, also one that looks at a
whole parameter (LAMB, Adafactor). See ``docs/design/sharding.md``.

Which optimizers may update a part of a weight, or some weights after the others: ``optimizer_trials``.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from weft.torch.tensor_parallel import cut_of
from weft.transport.private_c10d import broadcast_all

BUCKET_BYTES = 25 << 20
"""The most bytes of parameters that travel in one message."""


class Shares:
    """The parameters that each replica updates, by their number in the optimizer.

    ``group``: the ranks that hold the same part of the model; ``replica``: this rank's place in it.
    """

    def __init__(self, group: dist.ProcessGroup, replica: int, replicas: int) -> None:
        self.replica = replica
        self.replicas = replicas
        self._group = group
        self._replica_of: list[int] = []
        self._own: set[int] = set()
        self._load = {trains: [0] * replicas for trains in (True, False)}

    def extend(
        self, parameters: Sequence[Tensor], local: Sequence[bool], experts: Container[int] = ()
    ) -> None:
        """Give each new parameter to a replica: the largest first, each to the replica with the least so far.

        All replicas decide alike, because names, sizes and order are the same; so do ranks that have parts of the
        parameters, by the sizes of the whole ones. Frozen parameters are balanced apart, so
        that nothing has to move when they are trained later. Parameters of other partitions (not ``local``) count for
        nothing; nor do ``experts``, by their ids, of which each replica has and updates its own.
        """
        known = len(self._replica_of)
        new = range(known, len(parameters))
        self._replica_of += [0] * len(new)
        sizes = {number: _numbers(parameters[number]) for number in new}
        for number in sorted(new, key=lambda n: (-sizes[n], n)):
            if id(parameters[number]) in experts:
                self._replica_of[number] = self.replica
                self._own.add(number)
            elif local[number]:
                load = self._load[parameters[number].requires_grad]
                self._replica_of[number] = load.index(min(load))
                load[self._replica_of[number]] += sizes[number]

    def has(self, number: int) -> bool:
        """True if this replica updates the parameter of that number."""
        return self.replica_of(number) == self.replica

    def replica_of(self, number: int) -> int:
        """The replica that updates the parameter of that number."""
        return self._replica_of[number]

    def exchange(self, parameters: dict[int, Tensor]) -> None:
        """Bring each parameter (by number) from the replica that updates it to all replicas; collective."""
        for replica in range(self.replicas):
            mine = [
                parameter.detach()
                for number, parameter in parameters.items()
                if number not in self._own and self._replica_of[number] == replica
            ]
            if mine:
                broadcast_all(self._group, mine, BUCKET_BYTES, replica)


def tensors_and_plain(entries: dict[Any, dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's states by parameter, as tensors and other values by ``parameter/key``."""
    flat = {f"{number}/{key}": value for number, entry in entries.items() for key, value in entry.items()}
    tensors = {path: value for path, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {path: value for path, value in flat.items() if path not in tensors}


def by_parameter(flat: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The inverse of :func:`tensors_and_plain`, in the order of the parameters."""
    merged: dict[int, dict[str, Any]] = {}
    for path, value in flat.items():
        number, _, key = path.partition("/")
        merged.setdefault(int(number), {})[key] = value
    return {number: merged[number] for number in sorted(merged)}


def _numbers(parameter: Tensor) -> int:
    """The number of elements of the full parameter."""
    how = cut_of(parameter)
    return parameter.numel() if how is None else math.prod(how.shape)
