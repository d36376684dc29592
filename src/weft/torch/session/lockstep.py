"""Ranks that do the same at the same time: those that split tensors, and replicas that share parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.runtime.executor import Executor
from weft.runtime.lockstep import LockstepOrder
from weft.topology.mesh import Mesh
from weft.torch.session.device import rings_of
from weft.transport.channel import Mailbox
from weft.transport.torch_dist import TorchChannel


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that split tensors with this one; all is None where weights and sequences are whole.

    Attributes:
        channel: Between them.
        group: Theirs, for what they add up in a step.
        weights_group: The group of those of them that split weights.
        sequence_group: The group of those of them that share sequences, and have the same parts of weights.
        turns: Theirs.
        places: The place of this rank among those that share sequences, and among those that split weights.
    """

    channel: TorchChannel | None = None
    group: Any = None
    weights_group: Any = None
    sequence_group: Any = None
    turns: LockstepOrder | None = None
    places: tuple[int, int] = 0, 0

    @classmethod
    def connect(
        cls,
        mesh: Mesh,
        rank: int,
        split: int,
        mailbox: Mailbox,
        device: torch.device,
        timeout: timedelta,
        nccl: bool,
    ) -> TensorRanks:
        """These ranks, with groups of their own; every rank calls this. ``split``: over how many weights are split."""
        backend, of = ("nccl", device) if nccl else ("gloo", None)
        for ranks in mesh.groups("tp"):
            beside = dist.new_group(ranks, timeout, "gloo")
            group = dist.new_group(ranks, timeout, backend, device_id=of)
            if rank in ranks:
                mine, all_of_them = beside, group
        weights_group = sequence_group = all_of_them
        for ranks in mesh.groups("tp") if 1 < split < mesh.tp else ():
            rows = [ranks[first : first + split] for first in range(0, len(ranks), split)]
            for number, each in enumerate([*rows, *(ranks[place::split] for place in range(split))]):
                group = dist.new_group(each, timeout, backend, device_id=of)
                if rank in each and number < len(rows):
                    weights_group = group
                elif rank in each:
                    sequence_group = group
        rings, here = rings_of(mine, device), mesh.position("tp", rank)
        channel = TorchChannel(mine, device, mailbox=mailbox, rings=rings, after=mesh.rdp)
        peers = [peer for peer in range(mesh.tp) if peer != here]
        turns = LockstepOrder(channel, peers, here == 0, -1 - mesh.rdp, same_samples=True)
        return cls(channel, all_of_them, weights_group, sequence_group, turns, divmod(here, split))


@dataclass
class SharedTurns:
    """The turns that replicas take together, and the ranks that split tensors with them, as they gather parameters.

    Attributes:
        degree: How many replicas take the same turns; 1 where only ranks that split tensors do.
        channel: Between these ranks, if replicas take the same turns.
    """

    degree: int = 1
    channel: TorchChannel | None = None

    def end(self) -> None:
        """From now on each replica takes turns of its own."""
        self.degree = 1
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def begin(
        self, degree: int, ranks: Sequence[int], here: int, after: int, executor: Executor, device: torch.device,
        timeout: timedelta,
    ) -> None:  # fmt: skip
        """The microbatches of these ranks take the same turns from now on; each of them calls this.

        ``here``: the place of this rank among them. ``after``: how many peers other channels to its mailbox have.
        """
        group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        rings = rings_of(group, device)
        self.degree = degree
        self.channel = TorchChannel(group, device, mailbox=executor.mailbox, rings=rings, after=after)
        peers = [peer for peer in range(len(ranks)) if peer != here]
        executor.turns = LockstepOrder(self.channel, peers, here == 0, -1 - after, executor.wait_timeout_s)
