"""`"microbatches": "auto"` with one partition: the smallest number whose step fits the memory.

Nothing overlaps on one partition, so one microbatch is the quickest. More of them hold fewer activations at a time:

    need(m) = parameters + gradients + two moments + fixed + each * ceil(B / m)        m: number, B: samples

`fixed` and `each` are of a line through what autograd keeps of two small microbatches. These run forward only, on every
rank by itself: no replica waits for another one, and what does not fit is never tried.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import SyncBatchNorm

from weft.partition.cost import COPIES
from weft.plan.measured.microbatches import Line, Resident, fewest, with_several
from weft.torch.execution.chunked_loss import may_be_chunked
from weft.torch.model import DistributedModel
from weft.torch.session.collectives import gather_texts
from weft.torch.session.device import device_bytes
from weft.torch.session.session import Session
from weft.torch.split.first_microbatch import by_forward_runs
from weft.torch.split.memory_room import ROOM
from weft.torch.tensors.mini_batch import MiniBatch, prepare
from weft.torch.tensors.pytree import bytes_of, tensors_in
from weft.torch.trace.compiled import compiles
from weft.torch.trace.saved_memory import SavedMemory
from weft.torch.trace.trace import see_saved_tensors

log = logging.getLogger("weft")


def accumulate(session: Session, function: Callable[..., Any], batch: MiniBatch) -> MiniBatch:
    """The batch, cut into the number of microbatches that fits; decided here, collective over all ranks."""
    faults = [] if (fault := _cannot(session, batch)) is None else [fault]
    found = Resident(batch.size or 1, 0.0, Line(0.0, 0.0), math.inf)
    if not faults:
        try:
            found = _measured(session, function, batch)
        except Exception as error:  # one that the whole mini-batch has, too, comes when the step runs
            faults.append(f"a small microbatch cannot be run ({type(error).__name__}: {error})")
    own = json.dumps([found.to_record(), faults])
    gathered = [json.loads(text) for text in gather_texts(own, session.group("world"))]
    faults = [fault for _, of_rank in gathered for fault in of_rank]
    number, reasons = (
        1,
        f"microbatches: 1, because {faults[0]}, so that what it takes is not known" if faults else "",
    )
    if not faults:
        number, reasons, fits = fewest([Resident.from_record(one) for one, _ in gathered], batch.cut.uneven)
        if not fits and session.rank == 0:
            log.warning("no number of microbatches fits the memory: %s", reasons)
    if session.rank == 0:
        log.info("%s", reasons)
    session.decide_number(number, reasons)
    return prepare(function, batch.args, batch.kwargs, batch.cut, number)


def _cannot(session: Session, batch: MiniBatch) -> str | None:
    """Why the memory of the step is not known, if it is not. The same on all ranks."""
    modules = [module for model in session.models for module in model.module.modules()]
    if batch.size is None:
        return "the step is given no tensor that is cut"
    if batch.size > 1 and batch.cut.joined.units(batch.size) == 1:
        return "its loss joins all rows of the mini-batch"
    if session.mesh.tp > 1:
        return "weights are cut over ranks"
    if any(model.sharded for model in session.models):
        return "replicas share the model's parameters"
    if session.settings.expert_parallel_degree > 1:
        return "replicas share the model's experts"
    if session.settings.offload_activations:
        return "activations are offloaded"
    if any(map(compiles, modules)):
        return "a module is compiled"
    if any(isinstance(module, SyncBatchNorm) for module in modules):
        return "replicas exchange statistics in the forward pass"
    return None


def _measured(session: Session, function: Callable[..., Any], batch: MiniBatch) -> Resident:
    """The memory of this rank's step, by its samples."""
    assert batch.size is not None
    models = list(session.models)
    limit = device_bytes(session) * (1.0 if session.settings.memory_limit else ROOM)
    copies = COPIES - 2 * session.settings.offload_optimizer
    lasting = sum(_lasting_bytes(model, copies) for model in models)
    smallest = with_several(batch.size, batch.cut.uneven)[-1:-3:-1]
    kept: dict[int, float] = {}
    for number in smallest:
        samples = math.ceil(batch.size / number)
        if kept and lasting + Line.through(kept).at(samples) > limit:
            break
        cut = prepare(function, batch.args, batch.kwargs, batch.cut, number)
        kept[samples] = float(_kept_bytes(session, models, function, cut))
    return Resident(batch.size, float(lasting), Line.through(kept), limit)


def _lasting_bytes(model: DistributedModel, copies: int) -> int:
    """Parameters, their gradients and the moments of an optimizer that are on the device."""
    return sum(
        bytes_of(parameter) * (copies if parameter.requires_grad else 1)
        for parameter in model.module.parameters()
    )


def _kept_bytes(
    session: Session, models: Sequence[DistributedModel], function: Callable[..., Any], batch: MiniBatch
) -> int:
    """The bytes that autograd keeps of the first microbatch."""
    asked = [may_be_chunked(model.module, session.settings.chunked_loss) for model in models]

    def is_chunked(tensor: Tensor) -> bool:
        return any(of_model(tensor) for of_model in asked)

    def counted(run: Callable[[], Any]) -> int:
        tensors = (one for model in models for one in (*model.module.parameters(), *model.module.buffers()))
        memory, kept = SavedMemory(tensors), {False: 0, True: 0}

        def save(tensor: Tensor) -> Tensor:
            kept[is_chunked(tensor)] += memory.add(tensor)
            return (
                tensor.detach() if tensor.grad_fn is not None else tensor
            )  # itself would keep its graph for ever

        with see_saved_tensors(save):
            result = run()
        return kept[False] + kept[True] * any(map(is_chunked, tensors_in(result)))

    return by_forward_runs(session, models, function, batch, counted)
