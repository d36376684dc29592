"""Norms of gradients that lie on several ranks, and what clips them.

``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` mean the whole model: each rank has a part of its gradients,
and a rank that clipped by the norm of its own part would scale them by a factor of its own, in silence. Whether ranks
have to talk follows from the owners of what is given alone, so it is the same on every rank that is given the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.reduce.exchange import gather_rows
from weft.torch.calls.placeholders import Placeholder, elsewhere, is_gradient
from weft.torch.replicas.full_tensors import full_tensor, is_sharded
from weft.torch.session import current
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import axes_of, is_cut
from weft.torch.tensor_parallel.cuts import holders_along


class _Torch:
    """PyTorch's own."""

    total_norm = staticmethod(torch.nn.utils.get_total_norm)
    clip_grad_norm_ = staticmethod(torch.nn.utils.clip_grad_norm_)


def is_local(parameter: Tensor) -> bool:
    """True if this rank owns a parameter (every rank does before the partition)."""
    owner = parameter._weft_owner  # type: ignore[attr-defined]
    if owner is None:
        return True
    pipeline = current.session().pipeline
    return pipeline is None or bool(owner == pipeline.rank)


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over all ranks of the pipeline is at most ``max_norm``.

    Returns the norm before, the same on every rank; collective over the pipeline. A shared parameter counts once: it
    has one owner. As in ``torch.nn.utils.clip_grad_norm_``, gradients are multiplied by
    ``min(1, max_norm / (norm + 1e-6))``.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    given = list({id(p): p for p in parameters if is_local(p)}.values())
    session = current.session()
    axis = None if session.pipeline is None else "world" if shares_parameters(session) else "mp"
    first = axis is None or session.position("pp") == 0
    counted = [p for p in given if first or p._weft_owner is not None]  # type: ignore[attr-defined]
    return clip_along(axis, given, max_norm, norm_type, error_if_nonfinite, counted_once(session, counted))


def shares_parameters(session: Session) -> bool:
    """True if replicas of a pipeline have shares of parameters between steps, and of gradients."""
    return session.pipeline is not None and session.settings.replica_shards > 1


def counted_once(session: Session, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that count here, where other ranks that split tensors, or share them, have the same ones."""
    sequences, weights = session.tensor.places
    if sequences:
        return []  # the first ranks that share sequences have all of them
    counted = [each for each in parameters if not weights or "tp" in axes_of(each)]
    if not shares_parameters(session):
        return counted
    here = session.position("rdp")  # the first replicas that share a parameter have all of it
    return [each for each in counted if here < holders_along("rdp", each)]


def clip_along(
    axis: str | None, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0,
    error_if_nonfinite: bool = False, counted: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """As :func:`clip_grad_norm_`, for gradients of which each rank along an axis of the mesh has others.

    ``counted``: those that count here, where others are on every rank alike; all of them, if not given.
    """
    parameters = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in (parameters if counted is None else counted) if p.grad is not None]
    counts = {id(grad) for grad in grads}
    others = [p.grad for p in parameters if p.grad is not None and id(p.grad) not in counts]
    total = norm_along(axis, grads, norm_type, "clip_grad_norm_()", others)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of the gradients over all ranks is {total.item()}, so they cannot be clipped"
        )
    for shares in (True, False):  # PyTorch's function takes no list of both
        some = [each for each in parameters if is_sharded(each) == shares]
        if some:
            torch.nn.utils.clip_grads_with_norm_(some, max_norm, total.to(some[0].device))
    _record_norm(total)
    return total


def _record_norm(norm: Any) -> None:
    """Record a norm that is there; one on a GPU would have to be waited for."""
    session = current.session() if current.is_initialized() else None
    if (
        session is not None
        and session.recorder is not None
        and type(norm) is Tensor
        and norm.device.type == "cpu"
    ):
        session.recorder.note({"gradient_norm": float(norm)})


def _total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of gradients, of which some may be shares of FSDP2's; collective over the ranks that have the others."""
    shares = [each for each in grads if is_sharded(each)]
    rest = [each for each in grads if not is_sharded(each)]
    norms = [full_tensor(_Torch.total_norm(each, norm_type)) for each in (shares, rest) if each]
    if len(norms) == 1:
        return norms[0]
    kind = functools.reduce(torch.promote_types, [each.dtype for each in norms])
    return _norm_of(torch.stack([each.to(norms[0].device, kind) for each in norms]), norm_type)


def _is_mixed(tensors: Sequence[Tensor]) -> bool:
    """True if some of the tensors are shares, and some are not: PyTorch's functions take no such list."""
    return len({is_sharded(each) for each in tensors}) > 1


_PRECISIONS = torch.float32, torch.bfloat16, torch.float16, torch.float64


def norm_along(
    axis: str | None, grads: Sequence[Tensor], norm_type: float, what: str, alike: Sequence[Tensor] = ()
) -> Tensor:
    """The norm of gradients of which each rank along an axis of the mesh has others; collective over these.

    On all of them in the same precision: the widest that one of them has. ``alike``: gradients that another rank counts
    because it has the same; one that is not finite here alone makes the norm so.
    """
    session, norm_type = current.session(), float(norm_type)
    grads = [each for each in grads if each.numel()]  # of what another rank holds there is nothing
    local = _total_norm(grads, norm_type) if grads else torch.zeros((), device=session.device)
    if axis is None:
        return local
    # the precisions that ranks have go along: a factor in another one would let what all hold drift apart
    precisions = [float(bool(grads) and local.dtype == each) for each in _PRECISIONS]
    shared = full_tensor(_Torch.total_norm(alike, 1.0)) if alike else torch.zeros_like(local)
    norm, bad = torch.stack([local.double(), shared.double()]).tolist()  # together: a GPU is waited for once
    own = torch.tensor(
        [norm, bool(grads), 0.0 if math.isfinite(bad) else bad, *precisions], dtype=torch.float64
    )
    with session.doing(what):
        rows = gather_rows(own, session.group(axis))
    held = [each for each, has in zip(_PRECISIONS, rows[:, 3:].any(0).tolist(), strict=True) if has]
    norms = rows[rows[:, 1] > 0, 0]  # of ranks that have gradients
    total = _norm_of(norms, norm_type) + rows[:, 2].sum()
    return total.to(session.device, functools.reduce(torch.promote_types, held or [torch.float32]))


def _norm_of(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of several tensors together from the norm of each, as ``torch.nn.utils.get_total_norm`` has it; NaN if
    one is."""
    if not len(norms):
        return torch.zeros(())
    if norm_type == 0:  # of each part it is how many of its tensors are not zero
        return norms.sum()
    return torch.linalg.vector_norm(norms, norm_type)


# --- PyTorch's own functions ----------------------------------------------------------------------------------


@functools.wraps(_Torch.clip_grad_norm_)
def _clip(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    """``torch.nn.utils.clip_grad_norm_``; those of one rank alone are clipped there, and the norm is not elsewhere."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    owners = {getattr(parameter, "_weft_owner", None) for parameter in given} - {None}
    if len(owners) > 1:
        return clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite)
    remote = next((parameter for parameter in given if isinstance(parameter, Placeholder)), None)
    if remote is not None:
        return elsewhere(torch.zeros(()), remote, "the norm of the gradient of")
    if any(map(is_cut, given)):  # all on one partition, whose ranks have parts of them
        counted = counted_once(current.session(), given)
        axis = "stage" if shares_parameters(current.session()) else "tp"
        return clip_along(axis, given, max_norm, norm_type, error_if_nonfinite, counted)
    if owners or _is_mixed(given):  # all here: PyTorch's function would ask for the norm of all ranks
        return clip_along(None, given, max_norm, norm_type, error_if_nonfinite)
    norm = _Torch.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    _record_norm(norm)
    return norm


@functools.wraps(_Torch.total_norm)
def _norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.get_total_norm``; of a split model's gradients it is that of all ranks."""
    given = [
        each for each in ([tensors] if isinstance(tensors, Tensor) else tensors) if not is_gradient(each)
    ]
    session = current.session() if current.is_initialized() else None
    if session is None or session.pipeline is None or not _are_gradients(session, given):
        if not _is_mixed(given):
            return _Torch.total_norm(given, norm_type, error_if_nonfinite, foreach)
        return _finite(_total_norm(given, float(norm_type)), error_if_nonfinite)
    sharing, alike = shares_parameters(session), list[Tensor]()
    if session.mesh.tp > 1 or sharing:
        parameters = {id(p.grad): p for model in session.models for p in model.local_parameters()}
        counted = {id(p.grad) for p in counted_once(session, [parameters[id(each)] for each in given])}
        alike = [each for each in given if id(each) not in counted]
        given = [each for each in given if id(each) in counted]
    total = norm_along("world" if sharing else "mp", given, norm_type, "get_total_norm()", alike)
    total = _finite(total, error_if_nonfinite)
    return total.to(given[0].device) if given else total


def _finite(total: Tensor, needed: bool) -> Tensor:
    if needed and not torch.isfinite(total):
        raise RuntimeError(f"the norm over all ranks is {total.item()}")
    return total


def _are_gradients(session: Session, given: Sequence[Tensor]) -> bool:
    """True if tensors are this rank's gradients of a split model; a rank that owns none of them has an empty list."""
    own = {id(p.grad) for model in session.models if model.plan is not None for p in model.local_parameters()}
    return any(model.plan is not None for model in session.models) and all(id(each) in own for each in given)


REPLACED = ((_Torch.clip_grad_norm_, _clip), (_Torch.total_norm, _norm))
"""Functions of PyTorch, and what stands in their place."""
