"""The estimate of a rehearsal: what each rank holds of the models as they are planned, and what their step takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from weft import schedule
from weft.config import Settings
from weft.graph.model import Graph, Unit
from weft.machines.host import Machines
from weft.plan.chosen import execution, schedule_for
from weft.plan.measured.cut_units import shard_units
from weft.plan.parallelism.layer import all_reduce_s, gather_s
from weft.plan.parallelism.memory import LAYERS_HERE, RESERVED, copies
from weft.plan.parallelism.step import HOST_LINK
from weft.plan.search import recomputed
from weft.session.watching import describe_layout
from weft.simulate import Links, Simulation, StageCost, as_weft_runs
from weft.topology.cluster import Cluster
from weft.torch.context_parallel import Sequences
from weft.torch.execution.unit_call import FLOATING
from weft.torch.gathering.host_weights import waiting_bytes
from weft.torch.offload.activations import AHEAD_BYTES
from weft.torch.placed.plan import Plan, is_below
from weft.torch.rehearse.answer import UNKNOWN_MOMENTS, Answer, Part, Weight
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Splits
from weft.torch.tensor_parallel.splits import ONCE, ROW, Linear

CHOICES = 2
"""So many experts a row is taken to go to: routers keep the number for themselves."""


def estimate(session: Session, machines: Machines, plans: Sequence[tuple[Any, Plan]]) -> Answer:
    """The answer for models as they are planned; optimizer states as if there were two numbers a weight."""
    settings, mesh = session.settings, session.mesh
    device = machines.host.accelerator
    weights = [each for model, plan in plans for each in _weights(model.module, plan, settings)]
    stages, crossing = _stages(session, machines, plans)
    units = (each.unit.activation_bytes for _, plan in plans for each in _placed(plan))
    revisits = any(plan.revisits for _, plan in plans)
    layers = [_layers(plans, weights, at) for at in range(settings.partitions)]
    copied = [sum(each) * settings.offload_weights for each in layers]
    step, away = _step(session, machines, stages, max(units, default=0), revisits, copied)
    parts = [
        Part(
            at,
            _units(plans, at),
            sum(each.nbytes for each in weights if each.partition == at) + _buffers(plans, at),
            sum(each.nbytes for each in weights if each.partition == at and each.trained),
            0.0,
            step.peak_bytes[at],
            min(RESERVED, 0.1 * device.memory_bytes),
            fresh=max(
                (each.nbytes for each in weights if each.partition == at and each.trained), default=0.0
            ),
            host=away[at],
        )
        for at in range(settings.partitions)
    ]
    if _may_wait(settings):
        parts = [_with_layers(part, layers[part.partition], settings) for part in parts]
    if mesh.rdp > 1 and settings.sharded_data_parallel_degree == 1 and copies(machines):
        parts = [replace(part, copies=part.gradients) for part in parts]
    trains = any(stage.activation_bytes for stage in stages)  # an evaluation keeps nothing
    state_replicas = mesh.rdp if settings.shard_optimizer_state else 1
    most = max(part.gradients for part in parts)
    of_experts = [sum(each.nbytes for each in weights if each.partition == at and each.expert and each.trained)
                  for at in range(settings.partitions)]  # fmt: skip
    averaged_s = max(
        _averaging_s(session, machines, part.gradients, own)
        for part, own in zip(parts, of_experts, strict=True)
    )
    hidden_s = min(averaged_s * machines.host.conduct.data, step.step_s / 2)
    sum_s = averaged_s - hidden_s if trains else 0.0
    update_s = device.move_s((3 + 2 * UNKNOWN_MOMENTS) * most / state_replicas) if trains else 0.0
    if settings.offload_optimizer and trains:  # states come and go at once, beside the update of others
        update_s = max(update_s, UNKNOWN_MOMENTS * most / state_replicas / HOST_LINK)
    late = 1 + machines.host.conduct.late(mesh.world_size)
    return Answer(
        _layout(session, machines), device.name, device.memory_bytes, tuple(parts), tuple(weights), state_replicas,
        settings.offload_optimizer,
        (step.step_s + sum_s + update_s) * late, step.bubble, sum_s, update_s, crossing, trains,
        settings.microbatch_count, mesh.rdp,
    ).with_states({})  # fmt: skip


def _step(
    session: Session, machines: Machines, stages: Sequence[StageCost], largest: int, revisits: bool,
    weights: Sequence[float],
) -> tuple[Simulation, list[float]]:  # fmt: skip
    """A step by the schedule of the settings, or the one that was chosen; and what each rank has in host memory.

    A rank whose activations wait there computes no faster than these are copied; the same holds for ``weights``, the
    bytes of each rank that come for a pass through all of its stages. ``largest``: bytes that a unit keeps.
    """
    settings, chosen = session.settings, session.decided.chosen
    if chosen is not None and chosen.option.recompute:
        stages = recomputed(stages)
    if settings.auto_partition:
        made = schedule_for(settings, chosen, settings.microbatch_count)
    else:
        made = schedule.make("1f1b", settings.partitions, settings.microbatch_count)
    several = made.rank_of_stage
    stages = [
        _no_faster(stage, weights[rank] / several.count(rank) / HOST_LINK)
        for stage, rank in zip(stages, several, strict=True)
    ]
    links, how = Links(_between(session, machines)), execution(settings, revisits)
    step = as_weft_runs(made, stages, links, **how)
    if not how["offloads"]:
        return step, [0.0] * len(step.peak_bytes)
    how["offloads"] = False
    whole = as_weft_runs(made, stages, links, **how)
    if settings.partitions == 1:  # it goes out layer by layer, and some of it is fetched ahead
        peaks = [min(peak, AHEAD_BYTES + largest) for peak in whole.peak_bytes]
    else:
        peaks = list(step.peak_bytes)
    away = [float(before - after) for before, after in zip(whole.peak_bytes, peaks, strict=True)]
    copied = [
        _no_faster(stage, stage.activation_bytes / HOST_LINK) if away[rank] else stage
        for stage, rank in zip(stages, made.rank_of_stage, strict=True)
    ]
    return replace(as_weft_runs(made, copied, links, **how), peak_bytes=tuple(peaks)), away


def _may_wait(settings: Settings) -> bool:
    """True if weights can wait in host memory beside the other settings."""
    alone = settings.sharded_data_parallel_degree == settings.expert_parallel_degree == 1
    return alone and not (settings.compile or settings.rebalance or settings.min_replicas)


def _layers(plans: Sequence[tuple[Any, Plan]], weights: Sequence[Weight], partition: int) -> list[float]:
    """The bytes of each layer of a partition that can wait in host memory, as a rank has it, the largest first."""
    found = [each for model, plan in plans for each in waiting_bytes(model.module, plan, partition)]
    whole = sum(each.nbytes / each.share for each in weights if each.partition == partition)
    share = sum(each.nbytes for each in weights if each.partition == partition) / max(whole, 1.0)
    return sorted((share * each for each in found), reverse=True)


def _with_layers(part: Part, layers: Sequence[float], settings: Settings) -> Part:
    """A part all but a few of whose layers wait in host memory, or could."""
    away = sum(layers[LAYERS_HERE:])
    if not settings.offload_weights:
        return replace(part, may_wait=away)
    return replace(part, weights=part.weights - away, host=part.host + sum(layers))


def _no_faster(stage: StageCost, least_s: float) -> StageCost:
    """The stage where each pass that it has takes that long at least."""
    passes = {name: getattr(stage, name) for name in ("forward_s", "backward_s", "input_s")}
    return replace(stage, **{name: took_s and max(took_s, least_s) for name, took_s in passes.items()})


def _layout(session: Session, machines: Machines) -> str:
    settings = session.settings
    schedule, count, ways = describe_layout(session, settings.microbatch_count)
    words = [f"{settings.partitions} partitions", schedule] if settings.partitions > 1 else []
    words += [*ways, f"{count} microbatch{'es' * (count > 1)}"]
    return f"{session.mesh.world_size} ranks of {machines.host.accelerator.name}: {', '.join(words)}"


def _weights(root: nn.Module, plan: Plan, settings: Settings) -> Iterator[Weight]:
    """The parameters of a model, each once."""
    owners = plan.owners(root)
    cut, shared = (
        {} if splits is None else Splits.from_record(splits).linears()
        for splits in (plan.tensors, plan.experts)
    )
    for name, parameter in root.named_parameters():
        expert = any(_is_cut(name, each, linear) for each, linear in shared.items())
        share = 1 / (settings.expert_parallel_degree if expert else settings.sharded_data_parallel_degree)
        if any(_is_cut(name, each, linear) for each, linear in cut.items()):
            share /= settings.tensor_parallel_degree
        yield Weight(
            id(parameter),
            owners.get(name, 0),
            parameter.nbytes * share,
            share,
            parameter.requires_grad,
            expert,
        )


def _is_cut(name: str, module: str, linear: Linear) -> bool:
    """True if ranks share a parameter, as a part of a module that they share."""
    inside = name.removeprefix(f"{module}." if module else "")
    if not is_below(name, module) or (linear.kind == ROW and inside == "bias"):
        return False
    if linear.held and not any(each.rank is not None and is_below(inside, each.name) for each in linear.held):
        return False  # a router, say
    return not linear.parts or any(part.name == inside and part.dim != ONCE for part in linear.parts)


def _buffers(plans: Sequence[tuple[Any, Plan]], partition: int) -> float:
    """The bytes of buffers: every rank has those of its own units, and those of none."""
    found: dict[int, int] = {}
    for model, plan in plans:
        owners = plan.owners(model.module)
        for name, buffer in model.module.named_buffers():
            if owners.get(name, partition) == partition:
                found[id(buffer)] = buffer.nbytes
    return float(sum(found.values()))


def _units(plans: Sequence[tuple[Any, Plan]], partition: int) -> tuple[str, str, int]:
    names = [each.name for _, plan in plans for each in plan.units if each.partition == partition]
    return (names[0] or "the model", names[-1], len(names)) if names else ("nothing", "", 0)


def _stages(
    session: Session, machines: Machines, plans: Sequence[tuple[Any, Plan]]
) -> tuple[list[StageCost], int]:
    """The cost of each stage of the pipeline on a rank, and the most that crosses between two."""
    found: dict[int, list[Unit]] = {}
    settings, crossing = session.settings, 0
    for _, plan in plans:
        for each, unit in zip(_placed(plan), _divided(session, machines, plan), strict=True):
            found.setdefault(each.partition if each.stage is None else each.stage, []).append(unit)
    count = max(max(found, default=0) + 1, len(_rank_of_stage(session)))
    costs = []
    for stage in range(count):
        units = found.get(stage, [])
        size = units[-1].output_bytes if units and stage < count - 1 else 0
        crossing = max(crossing, size)
        backward_s = sum(unit.backward_ms for unit in units) / 1e3
        saved = sum(unit.activation_bytes for unit in units)
        costs.append(
            StageCost(
                forward_s=sum(unit.forward_ms for unit in units) / 1e3,
                backward_s=backward_s,
                input_s=backward_s / 2,
                weight_s=backward_s / 2,
                forward_bytes=size,
                backward_bytes=size,
                activation_bytes=saved,
                weight_bytes=saved,  # which of these W needs is not known by unit, and it keeps gradients besides
                transient_bytes=max((unit.transient_bytes for unit in units), default=0),
            )
        )
    assert settings.partitions <= count
    return costs, crossing


def _rank_of_stage(session: Session) -> Sequence[int]:
    if not session.settings.auto_partition:
        return range(session.settings.partitions)
    settings, chosen = session.settings, session.decided.chosen
    return schedule_for(settings, chosen, settings.microbatch_count).rank_of_stage


def _placed(plan: Plan) -> list[Any]:
    return [each for each in plan.units if each.partition != FLOATING]


def _divided(session: Session, machines: Machines, plan: Plan) -> list[Unit]:
    """The units of a plan as one rank of those that share their weights or sequences has them."""
    settings, units = session.settings, [each.unit for each in _placed(plan)]
    if plan.tensors is not None:
        splits = Splits.from_record(plan.tensors)
        units = [_cut(unit, splits) for unit in units]
        degree = settings.tensor_parallel_degree
        link = machines.tensor_ring(degree, along=bool(settings.sequence_parallel))
        units = list(shard_units(Graph(units), degree, link))
    if plan.experts is not None:
        shared = Splits.from_record(plan.experts).linears()
        units = [_with_exchange(unit, shared, session, machines) for unit in units]
    if plan.sequences is not None:
        regions = Sequences.from_record(plan.sequences).regions
        units = [
            _shortened(unit, settings.context_parallel_degree)
            if any(
                unit.name == each or is_below(unit.name, each) or is_below(each, unit.name)
                for each in regions
            )
            else unit
            for unit in units
        ]
    return units


def _cut(unit: Unit, splits: Splits) -> Unit:
    """The unit with the share that ranks can divide: all of it where its region is cut."""
    regions = [
        region for region in splits.regions
        if region.name == unit.name or is_below(region.name, unit.name) or is_below(unit.name, region.name)
    ]  # fmt: skip
    if not regions:
        return unit
    return replace(unit, cut_share=1.0, cut_bytes=unit.output_bytes * len(regions), cut_ranks=splits.size)


def _with_exchange(unit: Unit, shared: Mapping[str, Linear], session: Session, machines: Machines) -> Unit:
    """The unit with the time in which rows go to experts of other replicas and back, in each pass.

    Rows are taken to be as large as the unit's output, and to go to ``CHOICES`` ranks each.
    """
    degree, ranks = session.settings.expert_parallel_degree, session.peers("rdp")
    count = sum(is_below(name, unit.name) or name == unit.name for name in shared)
    size = unit.output_bytes * min(CHOICES, degree)
    pass_ms = 2 * count * machines.all_to_all_s(size, degree, ranks[1] - ranks[0]) * 1e3 if count else 0.0
    back_ms = pass_ms if unit.backward_ms else 0.0
    return replace(unit, forward_ms=unit.forward_ms + pass_ms, backward_ms=unit.backward_ms + back_ms)


def _shortened(unit: Unit, ranks: int) -> Unit:
    """The unit on its part of the sequence."""
    return replace(
        unit,
        forward_ms=unit.forward_ms / ranks,
        backward_ms=unit.backward_ms / ranks,
        activation_bytes=round(unit.activation_bytes / ranks),
        transient_bytes=round(unit.transient_bytes / ranks),
    )


def _between(session: Session, machines: Machines) -> Any:
    """The link from one partition's rank to another's."""
    peers, each = session.peers("pp"), machines.host.accelerators
    cluster = Cluster((each,) * machines.hosts, machines.host.inside, machines.host.network)
    return lambda sender, receiver: cluster.link(peers[sender], peers[receiver])


def _averaging_s(session: Session, machines: Machines, gradient_bytes: float, of_experts: float) -> float:
    """The seconds in which replicas average a rank's gradients, of which some are ``of_experts`` that they share."""
    mesh, degree = session.mesh, session.settings.sharded_data_parallel_degree
    ranks = session.peers("rdp")
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    gradient_bytes -= of_experts
    found = all_reduce_s(gradient_bytes, mesh.rdp // degree, machines.ring(mesh.rdp, stride))
    apart = mesh.rdp // session.settings.expert_parallel_degree  # replicas with the same experts
    if of_experts and apart > 1:
        found += all_reduce_s(
            of_experts, apart, machines.ring(apart, stride * session.settings.expert_parallel_degree)
        )
    if degree > 1:  # parameters are gathered twice, gradients are reduce-scattered
        found += 3 * gather_s(gradient_bytes * degree, degree, machines.sharing_ring(degree, stride))
    if session.settings.shard_optimizer_state:
        found += gather_s(gradient_bytes, mesh.rdp, machines.sharing_ring(mesh.rdp, stride))
    return found
