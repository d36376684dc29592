"""Small tensors of all replicas brought together, addressed so that no other microbatch's can be taken for them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import UsageError
from weft.runtime.microbatch import Microbatch, present
from weft.torch.session.session import Session
from weft.transport.channel import STATISTICS, Key, Message


class Exchange:
    """One forward call of one module: brings a small tensor of every replica together, in the replicas' order."""

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self._microbatch: Microbatch | None = None if session.pipeline is None else present()
        self._number = number
        if session.pipeline is not None and self._microbatch is None:
            raise UsageError(
                "SyncBatchNorm ran on a thread of autograd's own, for an activation checkpoint on a GPU: leave it out "
                "of what is checkpointed"
            )
        if self._microbatch is not None:
            times = self._microbatch.times
            name = f"statistics {number}"
            self._call = times[name] = times.get(name, 0) + 1

    def __call__(self, mine: Tensor, phase: int) -> Tensor:
        """[replicas, *mine.shape]; ``phase``: 0 forward, 1 backward."""
        host = mine.detach().cpu()
        if self._microbatch is None:
            everything = [torch.empty_like(host) for _ in range(self._session.mesh.rdp)]
            with self._session.doing("the statistics of BatchNorm"):
                dist.all_gather(everything, host, group=self._session.group("rdp"))
        else:
            everything = self._exchange_in_step(host, phase, self._microbatch)
        return torch.stack(everything).to(mine.device)

    def _exchange_in_step(self, mine: Tensor, phase: int, microbatch: Microbatch) -> list[Tensor]:
        channel = self._session.replicas
        assert channel is not None
        number = (self._number * 2 + phase) << 16 | self._call
        key = Key(STATISTICS, self._session.steps, microbatch.index, number)
        me = self._session.position("rdp")
        peers = range(self._session.mesh.rdp)
        for peer in peers:
            if peer != me:
                channel.send(peer, Message(key, mine))
        return [
            mine
            if peer == me
            else microbatch.receive(-1 - peer, key, "the statistics of BatchNorm from a replica").payload
            for peer in peers
        ]
