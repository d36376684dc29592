"""A plan put into effect: on each rank the model holds only the rank's own part."""

from __future__ import annotations

from torch import nn

from weft.torch.calls.placeholders import placeholder
from weft.torch.delayed_parameters import has_delayed, materialise
from weft.torch.execution.unit_call import attach, unit_call
from weft.torch.placed.cut import cut_weights
from weft.torch.placed.plan import Plan, is_below
from weft.torch.session.pipeline import SharedBuffer
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import cut


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
    owners = plan.owners(root)
    if has_delayed(root):
        cut_weights(root, plan, owners, session)
        materialise(root, lambda name: owners[name] == pipeline.rank, session.device, session.streams, cut)
    for name, parameter in root.named_parameters():
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
