"""The samples of ranks that share weights, where each of them reads its own."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import DivergenceError, UsageError
from weft.torch.session.collectives import gather_texts
from weft.torch.session.divergence import different_inputs
from weft.torch.session.session import Session
from weft.torch.tensors.mini_batch import MiniBatch, is_whole, named_tensors
from weft.torch.tensors.pytree import map_tensors


def with_samples_of_all(session: Session, batch: MiniBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with the samples of all ranks that split tensors, in their order; collective over these.

    What goes whole to every microbatch stays each rank's own, and has to be equal.

    Raises:
        DivergenceError: The ranks have tensors of other shapes or types.
        UsageError: A tensor needs a gradient, which would have to go back to its rank.
    """
    named = [*zip(batch.names, batch.args, strict=True), *batch.kwargs.items()]
    for name, argument in named:
        if hasattr(argument, "smp_slice"):
            raise UsageError(
                f"{name} cuts itself (smp_slice), so it cannot be joined with those of other ranks: write "
                '"inputs": "equal", and give all ranks that split tensors the same batch'
            )
    cut = [
        (name, argument) for name, argument in named if name not in batch.cut.whole and not is_whole(argument)
    ]
    shapes = {
        path: f"{tensor.dtype} {list(tensor.shape)}"
        for name, argument in cut
        for path, tensor in named_tensors(argument, name)
    }
    with session.doing("the samples of ranks that split tensors"):
        texts = gather_texts(json.dumps(shapes), session.group("tp"))
        difference = different_inputs(session, texts)
        if difference:
            raise DivergenceError(
                f'the ranks that split tensors have batches of other shapes: {difference}. With "inputs": "per_rank" '
                "each brings as many samples as the others"
            )

        def whole(name: str, argument: Any) -> Any:
            axis = batch.cut.axes.get(name, 0)
            return map_tensors(argument, lambda tensor: _joined(session, tensor, axis))

        known = dict(cut)
        args = tuple(
            whole(name, argument) if name in known else argument
            for name, argument in zip(batch.names, batch.args, strict=True)
        )
        return args, {
            n: whole(n, argument) if n in known else argument for n, argument in batch.kwargs.items()
        }


def _joined(session: Session, tensor: Tensor, axis: int) -> Tensor:
    """A tensor with those of the other ranks behind each other."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    if tensor.requires_grad:
        raise UsageError(
            'an input of the step needs a gradient, which would belong to several ranks: write "inputs": "equal", and '
            "give all ranks that split tensors the same batch"
        )
    own = tensor.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(session.mesh.tp)]
    dist.all_gather(parts, own, group=session.group("tp"))
    return torch.cat(parts, axis)
