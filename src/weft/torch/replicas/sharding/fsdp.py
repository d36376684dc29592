"""Sharded data parallelism: replicas share parameters, gradients and optimizer states, on PyTorch's FSDP2.

``torch.distributed.fsdp.fully_shard`` does the work. With a degree below the number of replicas, each *sharding group*
of that many replicas holds the model once, and gradients are averaged over the groups too (a mesh with two dims).
Outside of a forward and backward pass a parameter is a ``DTensor``; what leaves weft (states, checkpoints) is whole and
plain. Parameters without dimensions stay as they are. See ``docs/design/sharding.md``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from weft.torch.gathering.layers import blocks
from weft.torch.replicas.sharding.order import SharingOrder
from weft.torch.replicas.steps import backend_of, new_group
from weft.torch.session.session import Session


def shard(session: Session, module: nn.Module) -> tuple[SharingOrder, frozenset[str]]:
    """Let this rank keep only its share of every parameter of ``module``; collective over the replicas.

    Returns:
        What compares the order in which replicas use their layers; and the names of parameters without dimensions,
        which FSDP2 does not take: they stay whole, and nobody averages their gradients by now.
    """
    mesh = _mesh(session)
    scalars = {name: p for name, p in module.named_parameters(remove_duplicate=False) if not p.dim()}
    names = {part: name for name, part in module.named_modules()}
    layers = {names[block]: block for block in blocks(module)}
    for block in (*layers.values(), module):
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=set(scalars.values()))
    return SharingOrder(session, module, layers), frozenset(scalars)


def _mesh(session: Session) -> DeviceMesh:
    """The replicas as a grid: sharding groups of neighbours in its rows."""
    ranks, degree = session.peers("rdp"), session.settings.sharded_data_parallel_degree
    grid = torch.tensor(ranks).view(-1, degree)
    at = session.position("rdp")
    backend, device = backend_of(session), session.device.type
    row = new_group(session, tuple(grid[at // degree].tolist()), backend)
    if degree == len(ranks):
        return DeviceMesh.from_group(row, device, mesh_dim_names=("shard",))
    column = new_group(session, tuple(grid[:, at % degree].tolist()), backend)
    return DeviceMesh.from_group([column, row], device, mesh=grid, mesh_dim_names=("replicate", "shard"))
