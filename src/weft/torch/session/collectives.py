"""Small collectives over the session's groups, without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PeerError
from weft.torch.session.session import Session
from weft.transport.torch_dist import to_bytes


def agree_on(session: Session, make: Callable[[], str], what: str = "the partition") -> str:
    """The text that ``make`` gives on rank 0, on every rank.

    If ``make`` raises there, rank 0 raises that and all others :class:`PeerError` with its text.
    """
    text, error = "", None
    if session.rank == 0:
        try:
            text = make()
        except Exception as caught:
            error = caught
            text = "!" + f"{type(caught).__name__}: {caught}"
    with session.doing(what):
        text = broadcast_text(text, 0, session.group("world"))
    if error is not None:
        raise error
    if text.startswith("!"):
        raise PeerError(0, text[1:])
    return text


def broadcast_text(text: str, source: int, group: Any) -> str:
    """``text`` of global rank ``source``, on every rank of ``group``."""
    if group is None:
        return text
    content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    size = torch.tensor([content.numel()])
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, source, group=group)
    return to_bytes(content).decode()


def gather_texts(text: str, group: Any) -> list[str]:
    """Every rank's text, in the group's order, on every rank."""
    if group is None:
        return [text]
    content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([content.numel()]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: content.numel()] = content
    everything = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(everything, padded, group=group)
    return [to_bytes(part[: int(size)]).decode() for part, size in zip(everything, sizes, strict=True)]


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
