"""Steps of replicas: they begin with the same weights, average their gradients, and end together."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.session.recording import record
from weft.torch.session.session import Session
from weft.torch.tensor_parallel.cuts import holders_along

if TYPE_CHECKING:
    from weft.torch.replicas.reducer import Reducer, ReducerOptions


def synchronise(
    session: Session,
    model: Any,
    replica: int = 0,
    parameters: bool = True,
    only: Container[int] | None = None,
) -> None:
    """Give all replicas the parameters (if wanted) and buffers of one replica. ``only``: the ids of those to send."""
    if session.mesh.rdp == 1:
        return
    group = session.group("rdp")
    source = session.peers("rdp")[replica]
    with torch.no_grad():
        named = [*(model.module.named_parameters() if parameters else ()), *model.module.named_buffers()]
        for name, tensor in named:
            if holders_along("rdp", tensor) > 1:  # of experts each replica has others
                continue
            if model.is_local(name) and (only is None or id(tensor) in only):
                content = tensor.detach().cpu().contiguous()
                dist.broadcast(content, source, group=group)
                tensor.copy_(content)


def make_reducer(session: Session, model: Any, options: ReducerOptions) -> Reducer | None:
    """The reducer for the gradients of ``model``; ``None`` if there is one replica, or if FSDP2 averages all of them.

    Collective over the replicas.
    """
    named = model.reduced_parameters()
    if session.mesh.rdp == 1 or (model.sharded and not named):
        return None
    from weft.reduce.all_reduce_queue import AllReduceQueue  # here: one replica needs none of it
    from weft.reduce.choice import choose
    from weft.reduce.compression import make
    from weft.torch.replicas.reducer import Reducer
    from weft.torch.replicas.replica_agreement import Votes

    ranks = session.peers("rdp")
    on_gpus, own_gpus = session.device.type == "cuda", session.nccl
    settings = session.settings
    compression = make(settings.compression) if settings.compression else None
    group = new_group(session, ranks, backend_of(session))
    # A compression has a thread of its own. Its messages must not meet those of this thread in one group.
    beside = new_group(session, ranks, "gloo") if own_gpus or compression else group
    device = session.device if own_gpus else torch.device("cpu")
    algorithm = "direct" if on_gpus and not own_gpus else settings.all_reduce
    if settings.deterministic and algorithm == "auto":  # which would measure
        algorithm = "direct"
    compressed = compression is not None
    collective = choose(group, algorithm, device=device, compressed=compressed, timeout=session.timeout)
    known = weakref.ref(model)

    def buffers() -> Sequence[Tensor]:
        present = known()
        return () if present is None else list(present.local_buffers())

    options = replace(options, outside=session.pipeline is None, fixed=settings.deterministic)
    if settings.sharded_data_parallel_degree > 1:  # every step leaves shares of averages
        options = replace(options, as_view=False, passes=1, buffers=options.buffers and not model.sharded)
    queue = AllReduceQueue(collective, compression)
    own = beside if compression else group
    announced = partial(session.doing, "the gradients")
    votes = Votes(beside, session.agreement)
    reducer = Reducer(named, queue, own, votes, options, buffers, announced)
    weakref.finalize(reducer, queue.close).atexit = False
    return reducer


def backend_of(session: Session) -> str:
    """NCCL where each rank has a GPU of its own, else gloo."""
    return "nccl" if session.nccl else "gloo"


def new_group(session: Session, ranks: tuple[int, ...], backend: str) -> Any:
    """A group for the reducer alone, so that its sums never mix with those of a script."""
    return dist.new_group(ranks, session.timeout, backend, use_local_synchronization=True)


def begin_step(session: Session, microbatches: int) -> None:
    """Begin the step of all reducers; parameters that replicas share are whole from now on, or when needed."""
    if session.rejoin is not None:
        session.rejoin.begin_step(session)
    if session.pipeline is not None:
        shared = [model.shared for model in session.models if model.shared is not None]
        session.pipeline.gathering = [
            *(each.units.by_layer for each in shared if each.units is not None),
            *(model.host_weights.by_layer for model in session.models if model.host_weights is not None),
        ]
    if session.mesh.rdp > 1 and all(model.reducer is None for model in session.models):
        with session.doing("what replicas must have alike"):
            session.agreement.compare_replicas(session.agreement.to_compare())
    for model in session.models:
        if model.sharing_order is not None:
            model.sharing_order.begin()
        if model.shared is not None:
            with session.doing("the parameters that replicas share"):
                model.shared.gather()
        if model.host_weights is not None:
            model.host_weights.begin()
        if model.reducer is not None:
            model.reducer.divide_by_all = model.divide_by_all
            model.reducer.begin(microbatches)


def finish_step(session: Session, trained: bool) -> None:
    """Wait until all replicas have the averages. ``trained``: the step had a backward pass."""
    if session.rejoin is not None:
        session.rejoin.finish_step(session, trained)
    if session.mesh.rdp > 1:
        _average(session, trained)
    for model in session.models:
        if model.host_weights is not None:
            model.host_weights.end()


def _average(session: Session, trained: bool) -> None:
    with session.doing("the gradients"), record(session, "reduce"):
        for model in session.models:
            if model.reducer is not None:
                units = None if model.shared is None else model.shared.units
                model.reducer.finish(trained=units is not None and units.trained)
            if model.sharing_order is not None:
                model.sharing_order.compare()
            if model.sharded and model.broadcasts_buffers:
                synchronise(session, model, parameters=False)
            if model.shared is not None:
                model.shared.share()
            if model.experts is not None:
                model.experts.average()


@contextmanager
def join_steps(session: Session, model: Any, divide_by_initial_world_size: bool) -> Iterator[None]:
    """Inside, replicas may have different numbers of steps; see ``DistributedModel.join``."""
    model.divide_by_all = divide_by_initial_world_size
    yield  # an error inside must not be met by waiting for the others
    model.need_partition("join()")
    if model.reducer is not None:
        with session.doing("join()"):
            synchronise(session, model, model.reducer.shadow())
    model.divide_by_all = True
