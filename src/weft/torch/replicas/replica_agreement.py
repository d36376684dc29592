"""Agreement of replicas about a step, by small sums of whole numbers beside the gradients.

    header    who trains in this step, who has no batch left, who has yet to make buckets, who has changed the model,
              and a number that stands for rates, scales and loads, which must be alike
    trailer   which gradients somebody has, which buckets were launched too early

So a gradient that only some replicas have counts as zero for the others. A step that trains nothing moves nothing. A
replica that does something else than the others is found out, and does not leave them waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import DivergenceError

NONE, DENSE, SPARSE = range(3)


def _number_of(text: str) -> int:
    """A number from 1 on, the same for the same text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") % (2**31 - 1) + 1


@dataclass(frozen=True)
class Header:
    """The replicas' statements about a step.

    ``trains``: the replicas that train. ``done``: how many have no batch left. ``building``: how many need buckets.
    """

    trains: tuple[int, ...]
    done: int
    building: int


class Votes:
    """The small collectives of one reducer.

    Args:
        group: One that takes host tensors.
        agreement: Knows what replicas must have alike between steps; if not given, that is not compared.
    """

    def __init__(self, group: dist.ProcessGroup, agreement: Any = None) -> None:
        self.group = group
        self._agreement = agreement
        self._text = ""
        self.replica = dist.get_rank(group)
        self.replicas = dist.get_world_size(group)
        self._header: tuple[torch.Tensor, Any] | None = None

    def start_header(self, trains: bool, done: bool, building: bool, changed: bool = False) -> None:
        """Send the other replicas, once for each step, what this one does."""
        if self._header is not None:
            return
        header = torch.zeros(2 * self.replicas + 3, dtype=torch.int32)
        header[self.replica] = int(trains)
        self._text = "" if done or self._agreement is None else self._agreement.to_compare()
        if not done:  # who has no batch left sets nothing any more
            header[self.replicas + self.replica] = _number_of(self._text)
        header[-3:] = torch.tensor([done, building, changed])
        self._header = header, dist.all_reduce(header, group=self.group, async_op=True)

    def header(self) -> Header:
        """The statements of all replicas.

        Raises:
            DivergenceError: Only some replicas have changed the model, or what of it is trained; or they differ in what
            all must have alike.
        """
        assert self._header is not None
        (sums, work), self._header = self._header, None
        work.wait()
        *flags, done, building, changed = sums.tolist()
        trains, numbers = flags[: self.replicas], flags[self.replicas :]
        if len({*numbers} - {0}) > 1:
            self._agreement.compare_replicas(self._text)
        if changed not in (0, self.replicas):
            raise DivergenceError(
                f"{changed} of {self.replicas} replicas have changed modules or parameters of the model, the others "
                "have not: change them on all replicas before the same step, and while all of them have batches left"
            )
        header = Header(tuple(r for r, flag in enumerate(trains) if flag), done, building)
        if header.trains and building not in (0, self.replicas):
            raise DivergenceError(
                f"{building} of {self.replicas} replicas have changed which parameters are trained (requires_grad, "
                "dtype or device), or are in their first step, and the others are not: change that on all replicas "
                "before the same step, and while all of them have batches left"
            )
        return header

    def agree_on_change(self) -> None:
        """Announce that the model was changed.

        Raises:
            DivergenceError: Not all replicas have changed it before the same step.
        """
        self.start_header(trains=False, done=False, building=False, changed=True)
        self.header()

    def trailer(self, present: Sequence[bool], late: Sequence[bool]) -> tuple[list[int], list[int]]:
        """The number of replicas that have each gradient, and that launched each bucket too early."""
        sums = torch.tensor([*present, *late], dtype=torch.int32)
        dist.all_reduce(sums, group=self.group)
        counts: list[int] = sums.tolist()
        return counts[: len(present)], counts[len(present) :]

    def check_alike(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Refuse replicas that do not train the same parameters.

        Raises:
            DivergenceError: Names, shapes, dtypes or memory formats differ.
        """
        text = ";".join(f"{name} {tuple(p.shape)} {p.dtype} {p.stride()}" for name, p in named)
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        bounds = torch.tensor([digest, -digest])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.group)
        if bounds[0] != -bounds[1]:
            raise DivergenceError(
                f"the replicas train different parameters: this one {len(named)} with "
                f"{sum(p.numel() for _, p in named)} values; build the same model on every rank, with the same "
                "requires_grad, dtypes and memory formats"
            )

    def agree_on_kinds(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[int]:
        """For each gradient DENSE, SPARSE, or NONE if no replica has it."""
        kinds = [
            NONE if p.grad is None else SPARSE if p.grad.layout == torch.sparse_coo else DENSE
            for _, p in named
        ]
        most = torch.tensor(kinds, dtype=torch.int32)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        found: list[int] = most.tolist()
        return found

    def agree_on_order(self, order: Sequence[int], source: int) -> list[int]:
        """The order that the replica ``source`` gives, on all replicas."""
        agreed = torch.tensor(order, dtype=torch.int64)
        dist.broadcast(agreed, dist.get_global_rank(self.group, source), group=self.group)
        found: list[int] = agreed.tolist()
        return found
