"""Where this process stands on the mesh: rank, size and group functions for every axis.

With ``min_replicas`` each replica is a job of its own, whose ranks come one after the other among all.
"""

from __future__ import annotations

from weft.session.current import session
from weft.session.session import Session


def rank() -> int:
    """This process's number among all."""
    found = session()
    return found.place.rank + _before(found)


def size() -> int:
    """The number of processes of the job."""
    found = session()
    return found.place.world_size * _replicas(found)


def local_rank() -> int:
    """This process's number on its host."""
    found = session()
    return found.place.local_rank + _before(found)


def local_size() -> int:
    """The number of processes of the job on this host."""
    found = session()
    return found.place.local_size * _replicas(found)


def pp_rank() -> int:
    """The partition that this process runs."""
    return session().position("pp")


def pp_size() -> int:
    """The number of partitions of the model."""
    return session().mesh.size("pp")


def tp_rank() -> int:
    """This process's place among those that share each tensor."""
    return session().position("tp")


def tp_size() -> int:
    """Over how many processes a tensor is split."""
    return session().mesh.size("tp")


def rdp_rank() -> int:
    """This process's place among those that hold the same part of the model."""
    return _along("rdp")


def rdp_size() -> int:
    """The number of processes that hold the same part of the model."""
    found = session()
    return found.mesh.size("rdp") * _replicas(found)


def dp_rank() -> int:
    """The number of this process's shard of the data: shard and seed data by it."""
    return _along("dp")


def dp_size() -> int:
    """The number of different shards of the data."""
    found = session()
    return found.mesh.size("dp") * _replicas(found)


def mp_rank() -> int:
    """This process's place among those that together hold one replica."""
    return session().position("mp")


def mp_size() -> int:
    """The number of processes that hold one replica."""
    return session().mesh.size("mp")


def get_world_group() -> list[int]:
    """All ranks."""
    return list(range(size()))


def get_pp_group() -> list[int]:
    """The ranks of this process's pipeline."""
    return _peers("pp")


def get_tp_group() -> list[int]:
    """The ranks that share each tensor with this process."""
    return _peers("tp")


def get_rdp_group() -> list[int]:
    """The ranks that hold the same part of the model as this process."""
    return _peers("rdp", everywhere=True)


def get_dp_group() -> list[int]:
    """The ranks with the same partition as this process."""
    return _peers("dp", everywhere=True)


def get_mp_group() -> list[int]:
    """The ranks that hold one replica together with this process."""
    return _peers("mp")


def _replicas(found: Session) -> int:
    """The number of jobs of their own: one where the session is the whole job's."""
    return 1 if found.rejoin is None else int(found.rejoin.replicas)


def _before(found: Session) -> int:
    """The number of ranks in the replicas before this one."""
    return 0 if found.rejoin is None else int(found.rejoin.replica) * found.place.world_size


def _along(axis: str) -> int:
    found = session()
    before = 0 if found.rejoin is None else int(found.rejoin.replica) * found.mesh.size(axis)
    return found.position(axis) + before


def _peers(axis: str, everywhere: bool = False) -> list[int]:
    """The ranks along an axis, also in other replicas (``everywhere``)."""
    found = session()
    before = range(_replicas(found)) if everywhere else [_before(found) // found.place.world_size]
    return [each * found.place.world_size + rank for each in before for rank in found.peers(axis)]
