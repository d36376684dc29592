"""The answer of a rehearsal: the memory of a rank of each partition by what takes it, and the step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from weft import schedule
from weft.config import Settings
from weft.graph.model import Graph, Unit
from weft.machines.host import Machines
from weft.plan.chosen import ahead, schedule_for
from weft.plan.measured.cut_units import shard_units
from weft.plan.parallelism.layer import all_reduce_s, gather_s
from weft.plan.parallelism.memory import RESERVED, copies
from weft.plan.parallelism.step import HOST_LINK
from weft.plan.search import recomputed
from weft.session.watching import describe_layout
from weft.simulate import Links, Simulation, StageCost, as_weft_runs
from weft.topology.cluster import Cluster
from weft.torch.context_parallel import Sequences
from weft.torch.execution.unit_call import FLOATING
from weft.torch.offload.activations import AHEAD_BYTES
from weft.torch.offload.states import BUCKET_BYTES
from weft.torch.placed.plan import Plan, is_below
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Splits
from weft.torch.tensor_parallel.splits import ONCE, ROW, Linear
from weft.units import format_bytes, format_seconds

UNKNOWN_MOMENTS = 2
"""Numbers that an optimizer keeps for a weight where none has stepped: as many as Adam."""
FITS, DOES_NOT_FIT = 0, 3
"""Exit codes."""


@dataclass(frozen=True)
class Weight:
    """A parameter as each rank of its partition has it.

    Attributes:
        key: Its id.
        partition: Where it lies.
        nbytes: This rank's part of it.
        share: That part, from 0 to 1.
        trained: Whether it gets gradients.
    """

    key: int
    partition: int
    nbytes: float
    share: float
    trained: bool


@dataclass(frozen=True)
class Part:
    """The memory of a rank of one partition, in bytes.

    Attributes:
        partition: Its number.
        units: Its first and its last unit, and how many there are.
        weights: Parameters and buffers.
        gradients: Of the parameters that are trained.
        states: What the optimizer keeps.
        activations: At the peak, of all microbatches that it holds.
        reserved: The driver's and the libraries' own.
        copies: Of the gradients, which replicas average when no activation is left.
        host: Offloaded states and activations, in host memory.
    """

    partition: int
    units: tuple[str, str, int]
    weights: float
    gradients: float
    states: float
    activations: float
    reserved: float
    copies: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.weights + self.gradients + self.states + max(self.activations, self.copies) + self.reserved
        )


@dataclass(frozen=True)
class Answer:
    """The findings of a rehearsal.

    Attributes:
        layout: The job in words.
        device: The name of the device.
        memory_bytes: What it has.
        parts: The memory of a rank, by partition.
        weights: The parameters.
        state_replicas: How many replicas share optimizer states alone.
        offloads_states: Whether optimizer states wait in host memory.
        step_s: A step's seconds.
        bubble: The share of a pipeline's time in which its ranks wait.
        sum_s: The part of the step in which gradients are averaged and nothing else is done.
        update_s: The optimizer's.
        crossing_bytes: The most that goes from one partition to another, for each microbatch.
        trains: Whether the traced step has a backward pass.
        microbatches: How many a step has.
        replicas: How many there are.
    """

    layout: str
    device: str
    memory_bytes: float
    parts: tuple[Part, ...]
    weights: tuple[Weight, ...]
    state_replicas: int
    offloads_states: bool
    step_s: float
    bubble: float
    sum_s: float
    update_s: float
    crossing_bytes: int
    trains: bool
    microbatches: int
    replicas: int

    @property
    def fullest(self) -> Part:
        """The part of the rank that takes most."""
        return max(self.parts, key=lambda part: part.total)

    @property
    def fits(self) -> bool:
        """True if no rank takes more than its device has."""
        return self.fullest.total <= self.memory_bytes

    def with_states(self, session: Session, measured: Mapping[int, int]) -> Answer:
        """The same with what the script's optimizers keep, by parameter; two numbers a weight if none has stepped."""
        states = [0.0] * len(self.parts)
        for weight in self.weights:
            kept = UNKNOWN_MOMENTS * weight.nbytes if weight.trained else 0.0
            if measured:
                kept = measured.get(weight.key, 0) * weight.share
            states[weight.partition] += kept / self.state_replicas
        parts = tuple(self._with(part, kept) for part, kept in zip(self.parts, states, strict=True))
        return replace(self, parts=parts)

    def _with(self, part: Part, states: float) -> Part:
        """A part with so many bytes of optimizer states; of offloaded ones three buckets are on the device."""
        if not self.offloads_states or not part.gradients:
            return replace(part, states=states)
        there = min(states, 3 * BUCKET_BYTES * states / part.gradients)
        return replace(part, states=there, host=part.host + states - there)

    def text(self, took_s: float) -> str:
        """For people."""
        full = self.fullest
        offloads = any(part.host for part in self.parts)
        columns = ["weights", "gradients", "states", "activations", "reserved", "total"]
        columns += ["host"] if offloads else []
        rows: list[tuple[str, ...]] = [("partition", "units", *columns)]
        for part in self.parts:
            first, last, count = part.units
            named = first if count < 2 else f"{first} .. {last} ({count})"
            rows.append(
                (str(part.partition), named, *(format_bytes(getattr(part, each)) for each in columns))
            )
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = [f"weft rehearse: {self.layout}", ""]
        for row in rows:
            sizes = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join([row[0].rjust(widths[0]), row[1].ljust(widths[1]), *sizes]))
        of = f"{format_bytes(full.total)} of {format_bytes(self.memory_bytes)}"
        where = f"a rank of partition {full.partition} takes {of} of its {self.device}"
        lines += ["", f"It fits: {where}." if self.fits else f"It does not fit: {where}."]
        if not self.fits:
            lines += [f"  {line}" for line in self._remedies()]
        if self.trains:
            takes = f"A step takes about {format_seconds(self.step_s)}"
            details = [f"bubble {100 * self.bubble:.0f} %"] if len(self.parts) > 1 else []
            if self.sum_s:
                details.append(f"{format_seconds(self.sum_s)} of averaging gradients beside nothing else")
            details.append(f"{format_seconds(self.update_s)} of the optimizer")
            lines.append(f"{takes}: {', '.join(details)}.")
            if len(self.parts) > 1:
                lines.append(
                    f"Between partitions {format_bytes(self.crossing_bytes)} travel for each microbatch."
                )
        else:
            lines.append("The step has no backward pass: this is the memory of an evaluation.")
        lines.append(f"Rehearsed in {format_seconds(took_s)}; times are estimated from the device's rates.")
        return "\n".join(lines)

    def _remedies(self) -> Iterator[str]:
        """Single changes, and what they leave."""
        full = self.fullest
        less: list[tuple[float, str]] = []
        if self.replicas > 1 and self.state_replicas == 1:
            less.append((full.states * (1 - 1 / self.replicas), '"shard_optimizer_state": true'))
        if len(self.parts) > 1:
            more = f'"microbatches": {2 * self.microbatches}, where the batch has the rows'
            less.append((full.activations / 2, more))
        if self.replicas > 1 and self.replicas % 2 == 0:
            kept = full.weights + full.gradients + full.states
            less.append((kept / 2, f'"partitions": {2 * len(self.parts)}, with half the replicas'))
        less.append((0.7 * full.activations, "activation checkpointing of the blocks (about)"))
        if not self.offloads_states:
            less.append((full.states, '"offload_optimizer": true'))
        for saved, remedy in sorted(less, reverse=True):
            left = full.total - saved
            verdict = "fits" if left <= self.memory_bytes else "is not enough alone"
            yield f"{remedy}: {format_bytes(left)}, {verdict}"

    def to_json(self) -> str:
        """For programs."""
        record = {name: value for name, value in asdict(self).items() if name != "weights"}
        record["parts"] = [{**asdict(part), "total": part.total} for part in self.parts]
        return json.dumps({"weft": "rehearsal", "version": 1, "fits": self.fits, **record}, indent=1)


def answer(session: Session, machines: Machines, plans: Sequence[tuple[Any, Plan]]) -> Answer:
    """The answer for models as they are planned; optimizer states as if there were two numbers a weight."""
    settings, mesh = session.settings, session.mesh
    device = machines.host.accelerator
    weights = [each for model, plan in plans for each in _weights(model.module, plan, settings)]
    stages, crossing = _stages(session, machines, plans)
    step = _step(session, machines, stages)
    parts = [
        Part(
            at,
            _units(plans, at),
            sum(each.nbytes for each in weights if each.partition == at) + _buffers(plans, at),
            sum(each.nbytes for each in weights if each.partition == at and each.trained),
            0.0,
            step.peak_bytes[at],
            min(RESERVED, 0.1 * device.memory_bytes),
        )
        for at in range(settings.partitions)
    ]
    if settings.offload_activations:
        parts = [_offloaded(part, plans, stages, _rank_of_stage(session)) for part in parts]
    if mesh.rdp > 1 and settings.sharded_data_parallel_degree == 1 and copies(machines):
        parts = [replace(part, copies=part.gradients) for part in parts]
    trains = any(stage.activation_bytes for stage in stages)  # an evaluation keeps nothing
    state_replicas = mesh.rdp if settings.shard_optimizer_state else 1
    most = max(part.gradients for part in parts)
    averaged_s = _averaging_s(session, machines, most)
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
    ).with_states(session, {})  # fmt: skip


def _offloaded(
    part: Part, plans: Sequence[tuple[Any, Plan]], stages: Sequence[StageCost], rank_of_stage: Sequence[int]
) -> Part:
    """A part whose activations are offloaded.

    On the device are those of a microbatch, and of the next one that is fetched. Without a pipeline it is what is
    fetched ahead, beside the largest unit's.
    """
    if len(rank_of_stage) > 1:
        own = (stages[at].activation_bytes for at, rank in enumerate(rank_of_stage) if rank == part.partition)
        there = 2.0 * max(own, default=0)
    else:
        units = (each.unit.activation_bytes for _, plan in plans for each in _placed(plan))
        there = float(AHEAD_BYTES + max(units, default=0))
    there = min(part.activations, there)
    return replace(part, activations=there, host=part.activations - there)


def _step(session: Session, machines: Machines, stages: Sequence[StageCost]) -> Simulation:
    """A step by the schedule of the settings, or the one that was chosen."""
    settings, chosen = session.settings, session.decided.chosen
    if chosen is not None and chosen.option.recompute:
        stages = recomputed(stages)
    if settings.auto_partition:
        made = schedule_for(settings, chosen, settings.microbatch_count)
    else:
        made = schedule.make("1f1b", settings.partitions, settings.microbatch_count)
    return as_weft_runs(made, stages, Links(_between(session, machines)), ahead=ahead(settings))


def _layout(session: Session, machines: Machines) -> str:
    settings = session.settings
    schedule, count, ways = describe_layout(session, settings.microbatch_count)
    words = [f"{settings.partitions} partitions", schedule] if settings.partitions > 1 else []
    words += [*ways, f"{count} microbatch{'es' * (count > 1)}"]
    return f"{session.mesh.world_size} ranks of {machines.host.accelerator.name}: {', '.join(words)}"


def _weights(root: nn.Module, plan: Plan, settings: Settings) -> Iterator[Weight]:
    """The parameters of a model, each once."""
    owners = plan.owners(root)
    cut = {} if plan.tensors is None else Splits.from_record(plan.tensors).linears()
    for name, parameter in root.named_parameters():
        share = 1 / settings.sharded_data_parallel_degree
        if any(_is_cut(name, each, linear) for each, linear in cut.items()):
            share /= settings.tensor_parallel_degree
        yield Weight(
            id(parameter), owners.get(name, 0), parameter.nbytes * share, share, parameter.requires_grad
        )


def _is_cut(name: str, module: str, linear: Linear) -> bool:
    """True if ranks share a parameter, as a part of a module that they share."""
    inside = name.removeprefix(f"{module}." if module else "")
    if not is_below(name, module) or (linear.kind == ROW and inside == "bias"):
        return False
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


def _averaging_s(session: Session, machines: Machines, gradient_bytes: float) -> float:
    """The seconds in which replicas average the gradients of the rank that has most."""
    mesh, degree = session.mesh, session.settings.sharded_data_parallel_degree
    ranks = session.peers("rdp")
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    found = all_reduce_s(gradient_bytes, mesh.rdp // degree, machines.ring(mesh.rdp, stride))
    if degree > 1:  # parameters are gathered twice, gradients are reduce-scattered
        found += 3 * gather_s(gradient_bytes * degree, degree, machines.sharing_ring(degree, stride))
    if session.settings.shard_optimizer_state:
        found += gather_s(gradient_bytes, mesh.rdp, machines.sharing_ring(mesh.rdp, stride))
    return found
