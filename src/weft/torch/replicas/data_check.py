"""A check of data loaders before training: ranks of a replica read the same batches, other replicas other batches.

A script that shards by the number of the process, or not at all, trains without any error and learns worse. The check
says so before hours of training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from weft.errors import DivergenceError, UsageError
from weft.torch.session import current
from weft.torch.session.collectives import gather_texts
from weft.torch.session.divergence import describe_tensor, digest_of
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH
from weft.torch.tensors.mini_batch import named_tensors

_LINE = (
    "sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=weft.dp_size(), rank=weft.dp_rank(), "
    "seed=0)  # for DataLoader(dataset, sampler=sampler)"
)


def check_loader(loader: Iterable[Any]) -> None:
    """Compare the first batch of a data loader over all ranks; collective. Call it once, before training.

    An iterator of its own reads one batch; the random states of Python, NumPy and PyTorch stay as they were.

    Raises :class:`DivergenceError` on every rank, with the line to write, if ranks of one replica have different
    batches, two replicas have the same one, or a rank has none.
    """
    streams = current.session().streams
    before = streams.capture(TORCH | PYTHON | NUMPY)
    iterator = iter(loader)
    if iterator is loader:
        raise UsageError(
            "check_loader() got an iterator and would use up its first batch: give it the DataLoader"
        )
    batch = next(iterator, None)
    streams.restore(before)
    check_batch(batch)


def check_batch(batch: Any) -> None:
    """Compare a batch that the script has already over all ranks; collective. ``None`` stands for no batch."""
    session = current.session()
    if session.rehearsal is not None:  # the other ranks' batches are not there
        return
    with session.doing("the check of the data loaders"):
        prints = gather_texts("" if batch is None else fingerprint(batch), session.group("world"))
    fault = difference(
        prints, [session.mesh.position(session.reads, rank) for rank in session.mesh.group("world", 0)]
    )
    if fault:
        raise DivergenceError(fault)


def difference(prints: Sequence[str], replicas: Sequence[int]) -> str:
    """The fault of the ranks' batches; empty if there is none.

    ``prints``: the fingerprint of each rank's batch, empty where there is none. ``replicas``: the replica of each rank.
    """
    readers: dict[int, int] = {}
    owners: dict[str, int] = {}
    for rank, (mine, replica) in enumerate(zip(prints, replicas, strict=True)):
        if not mine.strip():
            return f"the data loader of rank {rank} has no batch: give each replica at least one"
        first = readers.setdefault(replica, rank)
        if mine != prints[first]:
            return (
                f"ranks {first} and {rank} belong to one replica, but their first batches differ: shard the data by "
                f"weft.dp_rank(), with the same seed on all ranks:\n    {_LINE}"
            )
        other = owners.setdefault(mine, replica)
        if other != replica:
            return (
                f"the replicas {other} and {replica} (dp_rank) have the same first batch: shard the data by "
                f"weft.dp_rank():\n    {_LINE}"
            )
    return ""


def fingerprint(batch: Any) -> str:
    """A short text that stands for all values of a batch's tensors; without tensors, for the batch's ``repr``."""
    found = [(path, describe_tensor(t), digest_of(t)) for path, t in named_tensors(batch, "batch")]
    text = repr(found) if found else repr(batch)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
