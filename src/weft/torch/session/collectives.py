"""Texts and small tensors over the session's groups, without pickle; in a step addressed to their microbatch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import UsageError
from weft.runtime.microbatch import Microbatch, present
from weft.session import collectives
from weft.session.collectives import Alone, BytesPort
from weft.torch.session.session import Session
from weft.transport.channel import STATISTICS, Key, Message
from weft.transport.groups import GroupPort


def port_of(group: Any) -> BytesPort:
    """The port of a group; that of a single process for ``None``."""
    return Alone() if group is None else GroupPort(group)


def agree_on(session: Session, make: Callable[[], str], what: str = "the partition") -> str:
    """The text that ``make`` gives on rank 0, on every rank; see :func:`weft.session.collectives.agree_on`."""
    return collectives.agree_on(session, port_of(session.group("world")), make, what)


def broadcast_text(text: str, source: int, group: Any) -> str:
    """``text`` of global rank ``source``, on every rank of ``group``."""
    return collectives.broadcast_text(text, source, port_of(group))


def gather_texts(text: str, group: Any) -> list[str]:
    """Every rank's text, in the group's order, on every rank."""
    return collectives.gather_texts(text, port_of(group))


def gather_tensors(
    tensors: dict[str, Tensor], plain: dict[str, Any], group: Any, ranks: Sequence[int]
) -> dict[str, Any]:
    """The union of every rank's named tensors (on the CPU) and JSON-able values, on every rank of ``group``."""
    merged: dict[str, Any] = {}
    described = {name: [str(t.dtype)[6:], list(t.shape)] for name, t in tensors.items()}
    for rank, text in zip(ranks, gather_texts(json.dumps([described, plain]), group), strict=True):
        names, values = json.loads(text)
        merged.update(values)
        for name, (dtype, shape) in names.items():
            if rank == dist.get_rank():
                content = tensors[name].detach().cpu().contiguous()
            else:
                content = torch.empty(shape, dtype=getattr(torch, dtype))
            if content.numel():
                dist.broadcast(content.view(-1).view(torch.uint8), rank, group=group)
            merged[name] = content
    return merged


class AllRanks:
    """All ranks of a session's job, as ``weft.checkpoint.agree`` asks for them. ``what``: what they do together."""

    def __init__(self, session: Session, what: str = "resume_from_checkpoint()") -> None:
        self._session, self._what = session, what
        self.rank, self.count = session.rank, session.place.world_size

    def gather(self, text: str) -> list[str]:
        with self._session.doing(self._what):
            return gather_texts(text, self._session.group("world"))

    def broadcast(self, text: str) -> str:
        with self._session.doing(self._what):
            return broadcast_text(text, 0, self._session.group("world"))


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
