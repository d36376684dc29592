"""The whole state of a model whose parameters and buffers lie on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from weft.torch.calls.placeholders import kind_of
from weft.torch.session.collectives import gather_tensors
from weft.torch.session.session import Session
from weft.torch.tensors.pytree import is_wrapped, made_like, plain_tensors_of


def whole_state(
    session: Session, module: nn.Module, owners: Mapping[str, int], content: dict[str, Any], prefix: str,
    first_only: bool,
) -> dict[str, Any]:  # fmt: skip
    """``content``, the state of ``module`` as this rank has it, with what other ranks own; collective over a pipeline.

    Weights that are made of other tensors travel as these. ``prefix``: of the names in ``content``. ``first_only``: the
    other ranks get an empty dict.
    """
    assert session.pipeline is not None
    kinds = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    mine = {
        f"{prefix}{name}": content[f"{prefix}{name}"]
        for name, owner in owners.items()
        if owner == session.pipeline.rank and f"{prefix}{name}" in kinds
    }
    wrapped = {
        f"{prefix}{name}": tensor
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        if is_wrapped(tensor)
    }
    parts = {
        f"{name}\0{number}": part.detach()
        for name in wrapped.keys() & mine.keys()
        for number, part in enumerate(plain_tensors_of(mine.pop(name)))
    }
    gathered = gather_tensors(mine | parts, {}, session.group("pp"), session.peers("pp"))
    if first_only and session.pipeline.rank != 0:
        return {}
    for name, tensor in wrapped.items():
        values = [
            gathered.pop(f"{name}\0{n}").to(tensor.device) for n, _ in enumerate(plain_tensors_of(tensor))
        ]
        content[name] = made_like(tensor, kind_of(tensor), iter(values))
    on_host = session.settings.offload_weights
    for name, value in gathered.items():
        content[name] = value.to("cpu" if on_host else kinds[name].device)
    return content
