"""Units that move to other ranks between two steps, with all that belongs to them.

Modules, parameters and buffers are the same objects on every rank, with values or as placeholders. So a unit moves by
its values: the rank that had them has placeholders from then on, and another one the values. With a parameter go its
gradient and what optimizers keep for it. Whatever the script holds (parameters, groups, hooks) stays as it is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.torch.backward.weight_gradients import large
from weft.torch.calls.placeholders import Placeholder, placeholder, put_values
from weft.torch.execution.chunked_loss import SEEN
from weft.torch.execution.unit_call import FLOATING, unit_call
from weft.torch.optimizer import DistributedOptimizer
from weft.torch.placed.changes import Outline
from weft.torch.placed.plan import Plan, PlannedUnit, is_below
from weft.torch.session.collectives import gather_tensors
from weft.torch.session.session import Session
from weft.torch.tensors.marks import WRAPPED
from weft.torch.tensors.pytree import plain_tensors_of, tensors_in

PLAIN = bool, int, float, str, type(None)
"""Values of an optimizer's state that travel as they are."""


def moved(plan: Plan, stages: Mapping[str, int], layout: Sequence[int], planned: Mapping[str, Any]) -> Plan:
    """The plan with units on other stages. ``layout``: the partition of each stage; ``planned``: the expected step."""
    units = tuple(
        unit
        if unit.partition == FLOATING
        else replace(unit, stage=stages[unit.name], partition=layout[stages[unit.name]])
        for unit in plan.units
    )
    buffers = {
        name: next((u.partition for u in units if u.partition != FLOATING and is_below(name, u.name)), at)
        for name, at in plan.buffers.items()
    }
    return replace(plan, units=units, buffers=buffers, planned=dict(planned))


def move(session: Session, model: Any, plan: Plan) -> None:
    """Let the units be where ``plan`` has them; collective over the pipeline."""
    pipeline = session.pipeline
    assert pipeline is not None
    before = {unit.name: unit.partition for unit in model.plan.units}
    modules = dict(model.module.named_modules())
    owners = plan.owners(model.module)
    seen: set[int] = set()
    with session.doing("moving units to other ranks"), torch.no_grad():
        for unit in plan.units:
            if unit.partition != before[unit.name]:
                _Move(session, model, unit, before[unit.name], owners, seen).run()
    for unit in plan.units:
        call = unit_call(modules[unit.name])
        call.owner, call.stage = unit.partition, unit.partition if unit.stage is None else unit.stage
        if unit.partition == pipeline.rank and pipeline.device.type == "cpu":
            pipeline.fuses |= any(map(large, modules[unit.name].parameters()))
    pipeline.forget_calls()
    model.plan, model.owners = plan, owners
    model.outline = Outline(model.module, not model.sharded)
    if model.reducer is not None:
        model.reducer.watch(model.reduced_parameters())
    SEEN.discard(model)


class _Move:
    """One unit on its way, as one rank sees it.

    Args:
        before: The partition that had it.
        owners: The partitions of all parameters and buffers from now on, by name.
        seen: The ids of the tensors that have moved, those of this unit too once it has.
    """

    def __init__(
        self, session: Session, model: Any, unit: PlannedUnit, before: int, owners: Mapping[str, int],
        seen: set[int],
    ) -> None:  # fmt: skip
        self._session, self._model, self._before, self._after = session, model, before, unit.partition
        self._here = session.position("pp")
        self._parameters = self._find(model.module.named_parameters(), unit.name, owners, seen)
        self._buffers = self._find(model.module.named_buffers(), unit.name, owners, seen)
        self._tensors: dict[str, Tensor] = {}
        self._plain: dict[str, Any] = {}

    def _find(
        self, named: Iterator[tuple[str, Any]], unit: str, owners: Mapping[str, int], seen: set[int]
    ) -> dict[str, Any]:
        """Those in the unit that go with it, and have not moved yet."""
        found = {}
        for name, tensor in named:
            goes = self._model.owners.get(name) == self._before and owners.get(name) == self._after
            if goes and (unit == name or is_below(name, unit)) and id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
        return found

    def run(self) -> None:
        """Send it, or take it, or note where it is."""
        if self._here == self._before:
            self._pack()
        session = self._session
        found = gather_tensors(self._tensors, self._plain, session.group("pp"), session.peers("pp"))
        for name, parameter in self._parameters.items():
            parameter._weft_owner = self._after
            if self._here == self._after:
                self._take(name, parameter, found)
                continue
            for optimizer in self._model.optimizers:
                optimizer.state.pop(parameter, None)
            placeholder(parameter, self._after, name)
        for name, buffer in self._buffers.items():
            if buffer._weft_owner is not None:
                buffer._weft_owner = self._after
            if self._here == self._after:
                put_values(buffer, self._values("buffer", name, found))
            elif isinstance(buffer, Placeholder) or buffer._weft_owner is not None:
                placeholder(buffer, self._after, name)

    def _pack(self) -> None:
        for name, parameter in self._parameters.items():
            self._add_all("value", name, parameter)
            if parameter.grad is not None and parameter.grad.is_sparse:
                grad = parameter.grad.coalesce()
                self._add(_path("indices", name), grad.indices())
                self._add(_path("grad", name), grad.values())
            elif parameter.grad is not None:
                self._add(_path("grad", name), parameter.grad)
            for number, optimizer in enumerate(self._model.optimizers):
                for key, value in optimizer.state.get(parameter, {}).items():
                    path = _path("state", name, str(number), key)
                    if isinstance(value, Tensor):
                        self._add(path, value)
                    else:
                        self._plain[path] = value
        for name, buffer in self._buffers.items():
            self._add_all("buffer", name, buffer)

    def _add_all(self, kind: str, name: str, tensor: Tensor) -> None:
        """Add a tensor as those that it is made of."""
        for number, part in enumerate(plain_tensors_of(tensor)):
            self._add(_path(kind, name, str(number)), part.detach())

    def _add(self, path: str, tensor: Tensor) -> None:
        """Add a tensor, and how it lies in memory; what an optimizer keeps on the CPU stays there."""
        self._tensors[path] = tensor
        self._plain[_path("lies", path)] = [*torch.empty_like(tensor, device="meta").stride()]
        self._plain[_path("cpu", path)] = tensor.device.type == "cpu"

    def _take(self, name: str, parameter: nn.Parameter, found: Mapping[str, Any]) -> None:
        """Let a parameter have its values, its gradient, and what optimizers keep for it."""
        put_values(parameter, self._values("value", name, found))
        if _path("grad", name) in found:
            grad = self._there(_path("grad", name), found)
            if _path("indices", name) in found:
                indices = self._there(_path("indices", name), found)
                grad = torch.sparse_coo_tensor(indices, grad, parameter.shape, is_coalesced=True)
            parameter.grad = grad
        for number, optimizer in enumerate(self._model.optimizers):
            start = _path("state", name, str(number), "")
            entry = {
                path.removeprefix(start): self._there(path, found) if isinstance(value, Tensor) else value
                for path, value in found.items()
                if path.startswith(start)
            }
            if entry:
                optimizer.take_over(parameter, entry)

    def _values(self, kind: str, name: str, found: Mapping[str, Any]) -> list[Tensor]:
        start = _path(kind, name, "")
        return [self._there(path, found) for path in found if path.startswith(start)]

    def _there(self, path: str, found: Mapping[str, Any]) -> Tensor:
        """A tensor that has arrived, where it belongs."""
        device = torch.device("cpu") if found[_path("cpu", path)] else self._session.device
        content: Tensor = found[path]
        if not content.dim():
            return content.to(device, copy=True)
        strides = found[_path("lies", path)]
        made = torch.empty_strided(content.shape, strides, dtype=content.dtype, device=device)
        return made.copy_(content)


def _path(*parts: str) -> str:
    return "\0".join(parts)


# --- what cannot move -----------------------------------------------------------------------------------------


def why_not(session: Session) -> str:
    """The reason why units of the models must stay where they are; empty if there is none."""
    models = session.models
    if len(models) > 1:
        gc.collect()  # some may be part of a cycle
        models = session.models
    if len(models) != 1:
        return "there are several models, and it moves units of one"
    if session.device.type != "cpu":
        return "it measures by the clock of the host, which does not see what a GPU takes"
    (model,) = models
    return next(filter(None, [*_model_faults(model), *map(_optimizer_fault, model.optimizers)]), "")


def _model_faults(model: Any) -> Iterator[str]:
    if model.has_comm_hook:
        yield "a communication hook may keep something for each parameter"
    root: nn.Module = model.module
    memory: dict[int, str] = {}
    named = (*root.named_parameters(), *root.named_buffers())
    for name, tensor in named:
        if isinstance(tensor, Placeholder):
            continue
        for part in filter(_has_memory, plain_tensors_of(tensor)):
            other = memory.setdefault(part.untyped_storage().data_ptr(), name)
            if other != name:
                yield f"{other} and {name} share their memory, and are two tensors"
    for name, module in root.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name or 'the model'} has an extra state (get_extra_state)"
        known = {id(tensor) for _, tensor in named}
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for tensor in filter(_has_memory, tensors_in(value)):
                other = memory.get(tensor.untyped_storage().data_ptr(), "")
                if other and id(tensor) not in known:
                    yield f"the attribute {attribute} of {name or 'the model'} is a view of {other}"


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _optimizer_fault(optimizer: DistributedOptimizer) -> str:
    inner, known = optimizer.optimizer, {id(weight) for weight in optimizer.weights()}
    name = type(inner).__name__
    if type(optimizer) is not DistributedOptimizer:
        return f"{type(optimizer).__qualname__} has copies of the parameters"
    apart = ("state", "param_groups", "defaults", WRAPPED)
    own = [value for key, value in vars(inner).items() if key not in apart]
    if any(isinstance(value, Optimizer) for value in own):
        return f"{name} has another optimizer in it"
    if any(tensor.numel() > 1 for tensor in tensors_in(own) if id(tensor) not in known):
        return f"{name} keeps tensors outside of its state"
    groups = [{key: value for key, value in each.items() if key != "params"} for each in inner.param_groups]
    if any(tensor.numel() > 1 for tensor in tensors_in(groups)):
        return f"{name} keeps tensors in its groups"
    for parameter, entry in inner.state.items():
        if id(parameter) not in known:
            return f"{name} keeps a state that is no parameter's"
        for key, value in entry.items():
            plain = isinstance(value, Tensor) and value.layout == torch.strided
            if type(key) is not str or not (plain or type(value) in PLAIN):
                return f"{name} keeps {key!r} of type {type(value).__name__} for a parameter"
    return ""
