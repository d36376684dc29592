"""A plan put into effect: on each rank the model holds only the rank's own part, and its shards over axis `tp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.session.recording import record
from weft.torch.calls.call_signature import unwatched
from weft.torch.calls.placeholders import placeholder
from weft.torch.context_parallel import Sequences
from weft.torch.delayed_parameters import has_delayed, materialise
from weft.torch.execution.thread_settings import in_microbatch
from weft.torch.execution.unit_call import UnitCall, attach, unit_call
from weft.torch.placed.plan import Plan, is_below
from weft.torch.pytorch.private import in_backward
from weft.torch.session.lockstep import TensorRanks
from weft.torch.session.offload import offloading
from weft.torch.session.pipeline import SharedBuffer
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Splits, cut

if TYPE_CHECKING:
    from weft.torch.context_parallel.weights import ContextGroup


def cut_weights(root: nn.Module, plan: Plan, owners: Mapping[str, int], session: Session) -> None:
    """Keep only this rank's part of the weights that the plan cuts; a model that is cut stays as it is.

    Collective over the ranks that split tensors. ``owners``: the partition of each parameter, by name. Parameters
    without memory are marked, and become parts when they are made.
    """
    if plan.tensors is None:
        return
    from weft.torch.tensor_parallel.apply import split  # it loads DTensor

    splits = Splits.from_record(plan.tensors)
    parameters = root.named_parameters(remove_duplicate=False)
    own = session.position("pp")
    here = {name for name, _ in parameters if owners.get(name, own) == own}
    mine = tuple(region for region in splits.regions if any(is_below(name, region.name) for name in here))
    splits = replace(splits, regions=mine)
    degree = session.settings.tensor_parallel_degree
    shard_group = split(
        root,
        splits,
        session.tensor.weights_group,
        session.tensor.places[1],
        degree,
        session.device,
        session.timeout,
    )
    if shard_group is not None:
        shard_group.record = partial(record, session, "tensor")
        shard_group.agree = partial(_agree, session.tensor)


def _agree(ranks: TensorRanks, what: str) -> None:
    """In the forward pass of a microbatch, ranks that split tensors do the same next; see ``Turns.agree``."""
    if in_microbatch() and not in_backward() and ranks.turns is not None:
        ranks.turns.agree(what)


def cut_over_sequences(
    root: nn.Module, plan: Plan, owners: Mapping[str, int], session: Session
) -> ContextGroup | None:
    """Let this rank's modules compute on its part of each sequence, as the plan says; the ranks that share them.

    Collective over the ranks that split tensors. ``owners``: the partition of each parameter, by name. Weights that are
    cut are so already.
    """
    if plan.sequences is None:
        return None
    from weft.torch.context_parallel.apply import cut_sequences  # it loads DTensor

    sequences = Sequences.from_record(plan.sequences)
    own = session.position("pp")
    here = {name for name, _ in root.named_parameters(remove_duplicate=False) if owners.get(name, own) == own}
    mine = {n: dim for n, dim in sequences.regions.items() if any(is_below(name, n) for name in here)}
    degree, ranks = session.settings.tensor_parallel_degree, torch.tensor(session.peers("tp"))
    pipeline = session.pipeline
    assert pipeline is not None
    shard_group = cut_sequences(
        root, replace(sequences, regions=mine), session.tensor.sequence_group, session.tensor.places[0], session.device,
        lambda: pipeline.drawing is not None, None if degree == 1 else ranks.view(-1, degree),
        {unit.name for unit in plan.units}, session.settings.context_parallel_attention,
    )  # fmt: skip
    for order in () if shard_group is None else (*shard_group.orders(), *shard_group.further):
        order.record = partial(record, session, "tensor")
        order.agree = partial(_agree, session.tensor)
        order.waits = session.settings.sharded_parameters_gathered == "step"
    return shard_group


def apply(root: nn.Module, plan: Plan, session: Session) -> None:
    """Intercept the units, note who owns what, and free the parameters of other ranks."""
    pipeline = session.pipeline
    assert pipeline is not None
    modules = dict(root.named_modules())
    for unit in plan.units:
        attach(
            modules[unit.name],
            unit.name,
            unit.partition,
            pipeline,
            unit.writes,
            unit.stage,
            unit.traced,
            unit.reads,
            unit.hooks,
        )
        if session.settings.compile and unit.partition == pipeline.rank:
            _compile(unit_call(modules[unit.name]))
        if session.settings.offload_activations:
            unit_call(modules[unit.name]).around = _offloaded
    owners = plan.owners(root)
    if has_delayed(root):
        cut_weights(root, plan, owners, session)
        if plan.experts is not None:
            from weft.torch.replicas.experts.apply import mark_experts  # it loads DTensor

            own = pipeline.rank
            mark_experts(
                session, root, Splits.from_record(plan.experts), lambda name: owners.get(name, own) == own
            )
        materialise(
            root, lambda name: owners[name] == pipeline.rank, session.device, session.streams, cut,
            session.weights_device,
        )  # fmt: skip
    else:
        _arrive(root, owners, session)
    for name, parameter in root.named_parameters():
        # the owner's forward pass would cast it, and the other ranks would not hear of that
        if name in plan.cast:
            parameter.data = parameter.data.to(getattr(torch, plan.cast[name]))
        parameter._weft_owner = owners[name]  # type: ignore[attr-defined]
        if owners[name] != pipeline.rank:
            placeholder(parameter, owners[name], name)
    for name, attribute in plan.attributes:
        pipeline.own.add(modules[name].__dict__, attribute)
        for unit in plan.units:
            if name == unit.name or is_below(name, unit.name):
                unit_call(modules[unit.name]).spots.append((modules[name].__dict__, attribute))
    for name, parameter in root.named_parameters():
        if name in plan.toggled:
            pipeline.own.add_trained(parameter)
            for unit in plan.units:
                if is_below(name, unit.name):
                    unit_call(modules[unit.name]).toggled.append(parameter)
    changing = plan.changing_buffers(owners)
    for name, buffer in root.named_buffers():
        buffer._weft_buffer = True  # type: ignore[attr-defined]
        if name in changing:
            buffer._weft_owner = owners[name]  # type: ignore[attr-defined]
            if owners[name] != pipeline.rank:
                placeholder(buffer, owners[name], name)
            elif name in plan.buffers and not any(is_below(name, unit.name) for unit in plan.units):
                pipeline.buffers[id(buffer)] = SharedBuffer(name, buffer)


def _compile(unit: UnitCall) -> None:
    """Let the compiler fuse what a unit does. A layer of PyTorch's own is one kernel as it is."""
    module = unit.module
    alone = next(module.children(), None) is None and type(module).__module__.startswith("torch.nn.")
    if not (alone or unit.compiled or unit.compiled_inside):
        unit.inner = unwatched(torch.compile(unit.inner), unit.inner)


def _offloaded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a unit's code; what autograd keeps for a microbatch that waits is offloaded."""
    with offloading():
        return call(*args, **kwargs)


def _arrive(root: nn.Module, owners: dict[str, int], session: Session) -> None:
    """Bring what this rank owns to its device, and free the rest: of a model that was too large to be there whole."""
    assert session.pipeline is not None
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.device != session.device:
            own = owners.get(name, session.pipeline.rank) == session.pipeline.rank
            hollow = tensor.data.new_zeros((), device=session.device).expand(tensor.shape)
            place = session.weights_device if isinstance(tensor, nn.Parameter) else session.device
            tensor.data = tensor.data.to(place) if own else hollow
