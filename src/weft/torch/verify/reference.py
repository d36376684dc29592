"""The reference run of a step on the rank that decides: all microbatches in one process, without side effects.

Parameters and buffers of other ranks are borrowed from their owners. ``dry_run`` brings the same things back as after
a trace. At most one microbatch's graph lives at a time, and of tensors only fingerprints stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.backward.autograd import foreign_hooks
from weft.torch.calls.placeholders import Placeholder, filled
from weft.torch.execution.entry_points import checkpoints_seen
from weft.torch.execution.thread_settings import current_scale
from weft.torch.execution.unit_call import UnitCall, unit_call
from weft.torch.pytorch.private import has_backward_hooks
from weft.torch.replicas.full_tensors import full_tensor
from weft.torch.session.session import Session
from weft.torch.tensors.mini_batch import MiniBatch
from weft.torch.tensors.pytree import CONSTANTS, plain_tensors_of
from weft.torch.trace.dry_run import Snapshot, dry_run
from weft.torch.verify.fingerprint import Fingerprint, fingerprint
from weft.torch.verify.lender import GOES_BACK, Lender
from weft.torch.verify.one_process import Alone, run_units_here
from weft.transport.channel import BORROWED

log = logging.getLogger("weft")

Named = dict[str, "Fingerprint | None"]


@dataclass
class Reference:
    """The values that one process gives, as fingerprints.

    Args:
        returned: For each microbatch, the tensors that the step returns.
        given: For each microbatch, the tensors that its backward passes begin at.
        units: For each microbatch, the inputs and results of each call of a unit, in order.
        gradients: The parameters' gradients at the end, if ``whole``.
        buffers: The buffers at the end. None where there are activation checkpoints: code that a checkpoint runs again
            may write buffers once more, in an order of its own.
        outside: Trainable parameters that are none of the model's, with the gradients before the step and after it.
        dtypes: The types that the step computes in, glue and what runs inside of units included.
        whole: Whether backward passes ran.
        again: The tensors that the first microbatch returns when the same process runs it once more.
        drew: The units, and what else has a stream of its own, that have drawn random numbers.
    """

    returned: list[list[Fingerprint]] = field(default_factory=list)
    given: list[list[Fingerprint | None]] = field(default_factory=list)
    units: list[dict[tuple[str, int], tuple[list[Fingerprint], list[Fingerprint]]]] = field(
        default_factory=list
    )
    gradients: Named = field(default_factory=dict)
    buffers: Named | None = None
    outside: list[tuple[Tensor, Fingerprint | None, Fingerprint | None]] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    whole: bool = False
    again: list[Fingerprint] = field(default_factory=list)
    drew: set[str] = field(default_factory=set)


def borrow(session: Session, models: Sequence[Any], by_unit: bool = False) -> dict[int, list[Tensor]]:
    """On the first rank, by ``id``, what parameters and buffers of other ranks of its pipeline are made of.

    Every rank of the pipeline calls this. ``by_unit``: without the parameters of units, which a ``Lender`` brings.
    """
    lent = {
        id(parameter)
        for _, call, _ in (units_of(models) if by_unit else ())
        for parameter in call.module.parameters()
    }
    assert session.pipeline is not None
    peers, group, rank = session.peers("pp"), session.group("pp"), session.pipeline.rank
    found: dict[int, list[Tensor]] = {}
    for model in models:
        for name, tensor in [*model.module.named_parameters(), *model.module.named_buffers()]:
            owner = model.owners.get(name, 0)
            if owner == 0 or not tensor.numel() or id(tensor) in lent:
                continue
            for each in plain_tensors_of(tensor) if rank in (0, owner) else ():
                if rank == owner:
                    content = each.detach().cpu().contiguous()
                    dist.send(content.view(-1).view(torch.uint8), peers[0], group=group, tag=BORROWED)
                else:
                    content = torch.empty(each.shape, dtype=each.dtype)
                    dist.recv(content.view(-1).view(torch.uint8), peers[owner], group=group, tag=BORROWED)
                    found.setdefault(id(tensor), []).append(content.to(session.device))
    return found


@contextmanager
def lend(models: Sequence[Any], values: dict[int, list[Tensor]]) -> Iterator[None]:
    """Inside, parameters and buffers hold these values."""
    with ExitStack() as stack:
        for model in models:
            for tensor in (*model.module.parameters(), *model.module.buffers()):
                if id(tensor) not in values:
                    continue
                if isinstance(tensor, Placeholder):
                    stack.enter_context(filled(tensor, values[id(tensor)]))
                else:
                    tensor.detach().copy_(values[id(tensor)][0])
        yield


@dataclass(frozen=True)
class OneProcess:
    """A step as one process runs it.

    Attributes:
        seed: Of the step's random numbers.
        values: The contents of parameters and buffers of other ranks, see :func:`borrow`.
        lender: Brings the parameters of a unit while it runs, if no rank can hold the model.
    """

    session: Session
    models: Sequence[Any]
    function: Callable[..., Any]
    batch: MiniBatch
    seed: int
    values: dict[int, list[Tensor]]
    lender: Lender | None = None

    def reference(self) -> Reference:
        """The values that one process gives; with a lender those of the first microbatch.

        Backward passes run if their gradients are wanted, or if the step looks at what backward passes do.

        Raises:
            UsageError: The step looks at what backward passes do, for which all of the model would have to be there.
        """
        modules = [part for model in self.models for part in model.module.modules()]
        whole = any(map(has_backward_hooks, modules))
        again = self._run(whole, trial=True)
        if self.lender is not None:
            reference = self._run(False, trial=True)
            reference.buffers = {}
        else:
            reference = self._run(again.whole or self.session.settings.verify == "gradients", trial=False)
        reference.again = again.returned[0]
        return reference

    def _run(self, whole: bool, trial: bool) -> Reference:
        """``trial``: only the first microbatch runs. ``whole``: backward passes run at once."""
        if whole and self.lender is not None:
            raise UsageError(GOES_BACK)
        return self._once(whole, trial) or self._run(True, trial)

    def _once(self, whole: bool, trial: bool) -> Reference | None:
        """None where the step looks at what backward passes do, and they do not run."""
        modules, session = [model.module for model in self.models], self.session
        if whole and any(foreign_hooks(parameter) for module in modules for parameter in module.parameters()):
            raise UsageError("the script has hooks on gradients that have grown, which would run once more")
        reference, checkpoints = Reference(whole=whole), checkpoints_seen()
        with self._borrowed() as (batch, snapshot):
            for index in range(1 if trial else batch.microbatches):
                alone = Alone(session.streams, self.seed, index, whole, snapshot, self.values, self.lender)
                given, named = batch.slice(index)
                with current_scale(batch.weight(index)):
                    reference.returned.append(alone.run(self.function, given, named))
                del given, named
                reference.given.append(alone.given)
                reference.units.append(alone.units)
                reference.dtypes |= alone.dtypes
                reference.drew |= alone.drawn.keys()
                if alone.asked and not whole:
                    return None
            if whole:
                reference.gradients = gradients_of(self.models)
                reference.outside = [
                    (leaf, of_gradient(grad), of_gradient(leaf.grad))
                    for leaf, grad in snapshot.leaves()
                    if isinstance(leaf, nn.Parameter)
                ]
            if checkpoints_seen() == checkpoints:
                reference.buffers = buffers_of(self.models)
            if not trial:
                session.proofs.left = state_elsewhere(self.models)
        return reference

    @contextmanager
    def _borrowed(self) -> Iterator[tuple[MiniBatch, Snapshot]]:
        """Inside, the models have ``values`` and run here as a whole. Gives a copy of the batch."""
        session, batch, given = self.session, self.batch, (self.batch.args, self.batch.kwargs)
        with (
            lend(self.models, self.values),
            dry_run(session, self.models, self.function, given, "verify") as dry,
            dry.snapshot().restored(None) as snapshot,
            ExitStack() as stack,
        ):
            for model in self.models:
                if model.reducer is not None:
                    stack.enter_context(model.reducer.suspend())
            for names, left in session.proofs.left or ():
                names.update(left)
            stack.enter_context(run_units_here({name: call for name, call, _ in units_of(self.models)}))
            args, kwargs = dry.given
            yield replace(batch, args=args, kwargs=kwargs), snapshot


def state_elsewhere(models: Sequence[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Flags, numbers and texts in the modules of other ranks, as this run leaves them; the next run begins so."""
    return [
        (vars(module), {name: value for name, value in vars(module).items() if isinstance(value, CONSTANTS)})
        for model in models
        for unit in model.plan.units
        if unit.partition > 0
        for module in model.module.get_submodule(unit.name).modules()
    ]


def units_of(models: Sequence[Any]) -> list[tuple[str, UnitCall, int]]:
    """The units of all models: names (with the number of the model, if there are several), calls, and partitions."""
    return [
        (_full(models, number, unit.name), unit_call(model.module.get_submodule(unit.name)), unit.partition)
        for number, model in enumerate(models)
        for unit in model.plan.units
    ]


def gradients_of(models: Sequence[Any], local: bool = False) -> Named:
    """Fingerprints of the gradients, or of those of this rank's own parameters, by name."""
    return {
        name: of_gradient(_gradient(parameter))
        for name, parameter in _named_tensors(models, "parameters", local)
        if parameter.requires_grad
    }


def buffers_of(models: Sequence[Any], local: bool = False) -> Named:
    """Fingerprints of the buffers, or of this rank's own, by name."""
    return {
        name: fingerprint(buffer)
        for name, buffer in _named_tensors(models, "buffers", local)
        if buffer.device.type != "meta"
    }


def of_gradient(grad: Tensor | None) -> Fingerprint | None:
    """The fingerprint of a gradient, if there is one."""
    return None if grad is None else fingerprint(grad)


def _gradient(parameter: Tensor) -> Tensor | None:
    """The gradient of all of a parameter; collective over the ranks that have parts of it."""
    return None if parameter.grad is None else full_tensor(parameter.grad, parameter)


def _named_tensors(models: Sequence[Any], what: str, local: bool) -> Iterator[tuple[str, Any]]:
    for number, model in enumerate(models):
        for name, tensor in getattr(model.module, f"named_{what}")():
            if not local or model.is_local(name):
                yield _full(models, number, name), tensor


def _full(models: Sequence[Any], number: int, name: str) -> str:
    return f"{number}.{name}" if len(models) > 1 else name
