"""Where this process stands on the mesh: rank, size and group functions for every axis."""

from __future__ import annotations

from weft.session.current import session


def rank() -> int:
    """This process's number among all."""
    return session().place.rank


def size() -> int:
    """The number of processes of the job."""
    return session().place.world_size


def local_rank() -> int:
    """This process's number on its host."""
    return session().place.local_rank


def local_size() -> int:
    """The number of processes of the job on this host."""
    return session().place.local_size


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
    return session().position("rdp")


def rdp_size() -> int:
    """The number of processes that hold the same part of the model."""
    return session().mesh.size("rdp")


def dp_rank() -> int:
    """The number of this process's shard of the data: shard and seed data by it."""
    return session().position("dp")


def dp_size() -> int:
    """The number of different shards of the data."""
    return session().mesh.size("dp")


def mp_rank() -> int:
    """This process's place among those that together hold one replica."""
    return session().position("mp")


def mp_size() -> int:
    """The number of processes that hold one replica."""
    return session().mesh.size("mp")


def get_world_group() -> list[int]:
    """All ranks."""
    return list(session().peers("world"))


def get_pp_group() -> list[int]:
    """The ranks of this process's pipeline."""
    return list(session().peers("pp"))


def get_tp_group() -> list[int]:
    """The ranks that share each tensor with this process."""
    return list(session().peers("tp"))


def get_rdp_group() -> list[int]:
    """The ranks that hold the same part of the model as this process."""
    return list(session().peers("rdp"))


def get_dp_group() -> list[int]:
    """The ranks with the same partition as this process."""
    return list(session().peers("dp"))


def get_mp_group() -> list[int]:
    """The ranks that hold one replica together with this process."""
    return list(session().peers("mp"))
