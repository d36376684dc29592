"""Sharded data parallelism: replicas share parameters, gradients and optimizer states, on PyTorch's FSDP2.

``torch.distributed.fsdp.fully_shard`` does the work. With a degree below the number of replicas, each *sharding group*
of that many replicas holds the model once, and gradients are averaged over the groups too (a mesh with two dims).
Outside of a forward and backward pass a parameter is a ``DTensor``; what leaves weft (states, checkpoints) is whole and
plain. Parameters without dimensions, and those of another type than most of their layer, stay whole. See
``docs/design/sharding.md``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from weft.torch.backward.autograd import has_gradient_hooks
from weft.torch.gathering.layers import blocks
from weft.torch.replicas.full_tensors import like
from weft.torch.replicas.sharding.order import SharingOrder
from weft.torch.replicas.steps import backend_of, new_group
from weft.torch.session.session import Session

log = logging.getLogger("weft")


def shard(session: Session, module: nn.Module) -> tuple[SharingOrder, frozenset[str]]:
    """Let this rank keep only its share of every parameter of ``module``; collective over the replicas.

    Returns:
        What compares the order in which replicas use their layers; and the names of parameters that FSDP2 does not
        take: they stay whole, and nobody averages their gradients by now.
    """
    mesh = _mesh(session)
    names = {part: name for name, part in module.named_modules()}
    layers = {names[block]: block for block in blocks(module)}
    grads = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    whole = {each for each in module.parameters() if has_gradient_hooks(each)}
    if session.rank == 0 and whole:
        log.info(
            "%d parameters stay whole on each replica: the script has hooks for their gradients", len(whole)
        )
    seen = {*whole}
    unlike: set[nn.Parameter] = set()
    for block in (*layers.values(), module):
        unlike |= _not_taken([each for each in block.parameters() if each not in seen])
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=whole | unlike)
        seen |= set(block.parameters())  # others than before
    for name, grad in grads.items():
        parameter = module.get_parameter(name)
        parameter.grad = like(grad, parameter)
    whole |= unlike
    unlike = {each for each in unlike if each.dim()}
    if session.rank == 0 and unlike:
        log.info(
            "%d parameters (%.0f MiB) stay whole on each replica: they have another type than most of their layer",
            len(unlike), sum(each.nbytes for each in unlike) / 2**20,
        )  # fmt: skip
    named = module.named_parameters(remove_duplicate=False)
    return SharingOrder(session, module, layers), frozenset(name for name, each in named if each in whole)


def _not_taken(parameters: Sequence[nn.Parameter]) -> set[nn.Parameter]:
    """Those of one layer's that FSDP2 does not take: without dimensions, no floating-point numbers, or of another type
    than most of the layer, whose parameters travel as one piece. Of two types of one size the first counts, on every
    rank alike."""
    sizes = Counter[torch.dtype]()
    for each in parameters:
        if each.is_floating_point() and each.dim():
            sizes[each.dtype] += each.nbytes
    most = sizes.most_common(1)[0][0] if sizes else None
    return {each for each in parameters if not each.dim() or each.dtype != most}


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
