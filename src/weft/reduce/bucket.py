"""Buckets: gradients that travel together, in the order in which the backward pass produces them.

    order of arrival    head.bias  head.weight  block2.weight  block1.weight  embedding
    cap                 |---- bucket 0 ------|  |------ bucket 1 ---------|  | bucket 2 |

A bucket can leave when its last gradient is there, so gradients that come one after the other belong together. It
holds one dtype on one device, because it is one flat tensor; a sparse gradient is a bucket of its own. Buckets leave in
the order of their numbers on every rank, so that ranks agree whatever order gradients arrive in. Where ranks share the
work of a sum, each has a shard of the flat tensor: equal shards, so that every rank moves as much as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """A gradient as the buckets see it. ``kind``: whatever must be the same in one bucket (dtype and device, say)."""

    numel: int
    itemsize: int
    kind: object = None
    sparse: bool = False


class Bucket(NamedTuple):
    """``members``: numbers of gradients in the order in which they lie in the flat tensor; ``sparse``: it has one."""

    members: tuple[int, ...]
    sparse: bool = False


def assign(slots: Sequence[Slot], order: Sequence[int], cap_bytes: int) -> list[Bucket]:
    """Buckets of at most ``cap_bytes`` (or of one gradient), in the order in which they fill up.

    ``order``: the numbers of all ``slots`` in order of arrival.

    >>> fp32, fp16 = Slot(100, 4, "fp32"), Slot(100, 2, "fp16")
    >>> [bucket.members for bucket in assign([fp32, fp16, fp32, fp32], [3, 2, 1, 0], 800)]
    [(3, 2), (1,), (0,)]
    """
    if sorted(order) != list(range(len(slots))):
        raise ValueError(f"the order {list(order)} does not name each of {len(slots)} gradients once")
    filling: dict[object, tuple[list[int], int]] = {}
    done: list[Bucket] = []
    for number in order:
        slot = slots[number]
        size = slot.numel * slot.itemsize
        if slot.sparse:
            done.append(Bucket((number,), sparse=True))
            continue
        members, filled = filling.get(slot.kind, ([], 0))
        if members and filled + size > cap_bytes:
            done.append(Bucket(tuple(members)))
            members, filled = [], 0
        filling[slot.kind] = ([*members, number], filled + size)
    done += [Bucket(tuple(members)) for members, _ in filling.values()]
    place = {number: position for position, number in enumerate(order)}
    return sorted(done, key=lambda bucket: place[bucket.members[-1]])


def bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Where each rank's shard of ``numel`` elements begins and ends; lengths differ by one at most.

    >>> bounds(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    edges = [numel * rank // ranks for rank in range(ranks + 1)]
    return list(zip(edges, edges[1:], strict=False))
