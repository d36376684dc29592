"""From a model to a plan, and from a plan to a rank that holds only its own part.

One rank traces and decides; the plan travels as JSON; every rank applies it.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from weft.config import Settings
from weft.errors import PlacementError, UsageError
from weft.graph.model import Unit
from weft.plan.chosen import Chosen, layout, most_in_flight
from weft.plan.measured.planned import Planned
from weft.runtime.allocator import give_back
from weft.schedule.table import KINDS
from weft.session.recording import record_facts, record_plan, record_units
from weft.simulate import FREE
from weft.torch.calls.attributes import own
from weft.torch.context_parallel import Sequences
from weft.torch.execution.unit_call import FLOATING
from weft.torch.model import DistributedModel
from weft.torch.placed.apply import apply
from weft.torch.placed.move import why_not
from weft.torch.placed.plan import Plan, PlannedUnit, is_below
from weft.torch.session.collectives import agree_on
from weft.torch.session.device import device_bytes, limit_bytes
from weft.torch.session.session import Session
from weft.torch.split.automatic import Watch, choose_automatically, expected_step, place_units
from weft.torch.split.by_hand import place_by_hand
from weft.torch.split.device_speed import measure_speeds
from weft.torch.split.first_microbatch import find_experts, find_splits, trace_step
from weft.torch.split.link_speed import MeasuredLink, keep_others_busy, measure_link
from weft.torch.split.memory_room import decide_optimize, fits
from weft.torch.split.microbatch_number import decide_number, need_cut
from weft.torch.split.open_modules import Choice, graph_of, piece_costs
from weft.torch.split.rebalance import Rebalance, refuse
from weft.torch.split.report import describe_units
from weft.torch.split.sharding import find_sequences
from weft.torch.split.unit_tree import Piece, Tree
from weft.torch.tensor_parallel import Splits, refuse_whole
from weft.torch.tensor_parallel.own_plan import beside_own_plan
from weft.torch.tensors.mini_batch import MiniBatch, prepare
from weft.torch.trace.record import Trace
from weft.units import format_bytes

log = logging.getLogger("weft")


def partition_models(
    session: Session,
    models: list[DistributedModel],
    function: Callable[..., Any],
    batch: MiniBatch,
    counted: bool = False,
) -> MiniBatch:
    """Trace, decide and apply for every model that has no partition yet; collective over all ranks.

    ``counted``: the step says itself what its microbatches weigh.

    Returns the batch, cut into as many microbatches as there are from now on.

    All are traced before any is split, because the step may call each of them.
    """
    if session.settings.rebalance:
        refuse(why_not(session))
    if session.settings.devices == "measured":
        session.decide(devices=measure_speeds(session))
    plans = []
    number_open = session.settings.microbatches == "auto"
    if number_open:
        need_cut(batch)
    by_link = KINDS[session.settings.pipeline].measured and session.decided.chosen is None or number_open
    link = measure_link(session) if by_link and session.mesh.pp > 1 else None
    if number_open:
        batch = cut_by_decided_number(session, models, function, batch, link)
    for model in models:
        with nullcontext() if link is None else keep_others_busy(session):
            text = agree_on(
                session, functools.partial(_plan_text, session, model, function, batch, link, counted)
            )
        plans.append(Plan.from_json(text))
        if plans[-1].chosen is not None:
            session.decided.use_schedule(Chosen.from_record(plans[-1].chosen), Watch())
    measured = not any(model.resumed_plan is not None or model.estimated for model in models)
    for model, plan in zip(models, plans, strict=True):
        apply(model.module, plan, session)
        give_back()
        session.streams.numpy = session.streams.numpy or plan.numpy
        model.finish_partition(plan)
        record_units(session, describe_units(plan), measured)
        if session.settings.optimize == "auto" and plan.optimize or plan.optimize == "memory":
            session.decide(optimize=plan.optimize, memory_weight=plan.memory_weight)
        if session.rank == 0:
            _log_split(session, model.module, plan)
    record_plan(session, _planned(plans))
    if session.settings.rebalance:
        session.rebalance = Rebalance(session.settings.speeds)
    if session.settings.tensor_parallel_degree > 1:
        found = [Splits.from_record(plan.tensors) for plan in plans if plan.tensors is not None]
        record_facts(session, cut_layers=sum(len(each.linears()) for each in found))
    return batch


def _log_split(session: Session, module: nn.Module, plan: Plan) -> None:
    """Log the parts of a model, and warn of what was asked for and is not there."""
    placement = plan.placement(session.settings.partitions, session.settings.microbatch_count)
    named, warnings = type(module).__name__, list(placement.warnings)
    session.views.opening.add(named, placement)
    log.info("Partition assignments of %s:\n%s", named, placement.tables())
    if plan.tensors is not None:
        splits = Splits.from_record(plan.tensors)
        beside = beside_own_plan(module, splits)
        log.info("Weights cut over ranks:\n%s", "\n".join(filter(None, [splits.text(), beside])))
        warnings.append(splits.warning(named))
    if plan.experts is not None:
        from weft.torch.replicas.experts.find import table, warning  # it loads DTensor

        shared = Splits.from_record(plan.experts)
        log.info("Experts over replicas:\n%s", table(shared))
        warnings.append(warning(shared, named))
    if plan.sequences is not None:
        log.info("Sequences cut over ranks:\n%s", Sequences.from_record(plan.sequences).text())
    for text in filter(None, warnings):
        log.warning("%s", text)


def _planned(plans: Sequence[Plan]) -> Planned | None:
    """The expected step with all these models; None where an older checkpoint's plan does not say."""
    steps = [Planned.from_record(plan.planned) for plan in plans if plan.planned is not None]
    return functools.reduce(Planned.plus, steps) if len(steps) == len(plans) else None


def cut_by_decided_number(
    session: Session,
    models: list[DistributedModel],
    function: Callable[..., Any],
    batch: MiniBatch,
    link: MeasuredLink | None,
) -> MiniBatch:
    """The batch, cut into the number of microbatches that a checkpoint's plan has, or else the quickest one."""
    resumed = [model.resumed_plan.microbatches for model in models if model.resumed_plan is not None]
    number, reasons = max(resumed, default=0), ""
    if not number:
        decide = functools.partial(decide_number, session, models, function, batch, link or MeasuredLink())
        with keep_others_busy(session):
            text = agree_on(session, lambda: json.dumps(decide()), "the number of microbatches")
        number, reasons = json.loads(text)
        if session.rank == 0:
            log.info("%s", reasons)
    session.decide_number(number, reasons)
    return prepare(function, batch.args, batch.kwargs, batch.cut, number)


def _plan_text(
    session: Session,
    model: DistributedModel,
    function: Callable[..., Any],
    batch: MiniBatch,
    link: MeasuredLink | None,
    counted: bool,
) -> str:
    if model.resumed_plan is not None:  # that of the checkpoint
        return str(model.resumed_plan.to_json())

    def make() -> str:
        return make_plan(session, model, function, batch, link, counted).to_json()

    return make() if session.rejoin is None else session.rejoin.share_plan(make)


def make_plan(
    session: Session,
    model: DistributedModel,
    function: Callable[..., Any],
    batch: MiniBatch,
    link: MeasuredLink | None = None,
    counted: bool = True,
) -> Plan:
    """Trace the step and place the model's units; on the rank that decides. ``link``: measured, for `auto`."""
    traced = trace_step(session, model, function, batch, counted)
    experts = find_experts(session, model, function, batch, traced.leaking)
    tensors = find_splits(session, model, function, batch, traced.leaking, experts)
    tensors = _sendable(tensors, traced, session, model.module)
    if not any(record.calls for record in traced.records.values()):
        raise UsageError(
            "the step never called the model: call it inside the function that @weft.step decorates"
        )
    tree = Tree(model.module, traced)
    sequences = find_sequences(session, model, function, batch, traced, tensors)
    tree.closed = frozenset() if tensors is None else frozenset(region.name for region in tensors.regions)
    tree.closed |= frozenset() if sequences is None else sequences.regions.keys()
    # mixtures that are not shared stay in one piece, too: what their experts send each other depends on samples, and
    # while replicas exchange rows, no message between partitions comes
    tree.closed |= frozenset() if experts is None else {*experts.linears(), *experts.whole}
    for name, reason in traced.whole.items():
        if tree.children[name]:
            log.warning("%s %s", name or f"the model ({type(model.module).__name__})", reason)
    stuck = filter(tree.stuck, traced.leaking & tree.records.keys())
    for name in stuck if session.settings.partitions > 1 else ():
        log.warning(
            "%s stores tensors in an attribute or list instead of returning them, and cannot be opened, "
            "because it is compiled or has backward hooks. So what calls it stays on one partition as a whole", name,
        )  # fmt: skip
    if session.settings.rebalance:
        refuse(_kept_in_attributes(traced))
    settings, found, chosen = _decide(session, model, tree, link)
    _check_buffers(tree, set(found.opened))
    costs = piece_costs(found.pieces, settings)
    plan = _plan(tree, traced, set(found.opened), found.pieces, found.stages, found.partitions, costs)
    if settings.deterministic and not plan.serial and _mixes(plan, found):
        log.info(
            "deterministic: a partition is visited twice, or two stages use one weight, so that sums would follow "
            "the arrival of messages: each microbatch waits for the one before"
        )
        plan = replace(plan, serial=True)
    return replace(
        plan, chosen=None if chosen is None else chosen.to_record(), optimize=settings.optimize,
        tensors=None if tensors is None else tensors.to_record(),
        sequences=None if sequences is None else sequences.to_record(),
        experts=None if experts is None else experts.to_record(),
        planned=Planned.of(expected_step(settings, found, chosen or session.decided.chosen)).to_record(),
        memory_weight=settings.memory_weight, in_flight=most_in_flight(settings),
        by_hand=not settings.auto_partition,
        microbatches=settings.microbatch_count if "microbatches" in session.decided.names else 0,
    )  # fmt: skip


def _sendable(splits: Splits | None, traced: Trace, session: Session, root: nn.Module) -> Splits | None:
    """The splits without modules that must be opened between partitions: those that tensors get out of otherwise, and
    those that hold so much that no part of the model would be left for others."""
    partitions = session.settings.partitions
    if splits is None:
        return splits
    most = sum(p.numel() for p in root.parameters()) / partitions
    names = [region.name for region in splits.regions]
    large = {
        name
        for name in names
        if partitions > 1
        and any(other != name and is_below(other, name) for other in names)
        and sum(p.numel() for p in root.get_submodule(name).parameters()) > most
    }
    splits = _without(splits, large, "what calls it would have to stay on one partition as a whole", root)
    leaking = {
        region.name
        for region in splits.regions
        if any(name == region.name or is_below(name, region.name) for name in traced.leaking)
    }
    if not leaking:
        return splits
    log.warning(
        "%s stores tensors in an attribute or a closure, neither returned nor put into what it is given, "
        "which ranks of other partitions would not see. So its weights are not cut over ranks: let it return them, or "
        'put them into a list, dict or object that it is given, or write "partitions": 1',
        ", ".join(sorted(leaking)[:3]),
    )  # fmt: skip
    return _without(splits, leaking, "stores tensors that it does not return", root)


def _without(splits: Splits, names: set[str], reason: str, root: nn.Module) -> Splits:
    """The splits, but for those of these modules.

    Raises:
        UsageError: The script wants some of them to be split.
    """
    whole = {name: reason for region in splits.regions if region.name in names for name in region.linears}
    refuse_whole(root, whole)
    kept = tuple(region for region in splits.regions if region.name not in names)
    return replace(splits, regions=kept, whole={**splits.whole, **whole})


def _mixes(plan: Plan, found: Choice) -> bool:
    """True if gradients of one parameter come from several places of a microbatch, so that those of two meet."""
    stages: dict[int, set[int]] = {}
    for piece, stage in zip(found.pieces, found.stages, strict=True):
        for number in piece.module_parameters():
            stages.setdefault(number, set()).add(stage)
    return plan.revisits or any(len(where) > 1 for where in stages.values())


def _decide(
    session: Session, model: DistributedModel, tree: Tree, link: MeasuredLink | None
) -> tuple[Settings, Choice, Chosen | None]:
    """The placement, for ``auto`` with its schedule, and the settings with what ``optimize`` is.

    Time comes first; memory only where ranks have too little of it.
    """
    settings = decide_optimize(session.settings, "speed")
    found, chosen = _place(session, settings, model, tree, link)
    available = device_bytes(session)
    if session.settings.optimize == "auto" and not fits(found.pieces, found.partitions, settings, available):
        settings = decide_optimize(session.settings, "memory")
        log.info(
            'a split by time alone leaves less than 30 % of %s on a rank: optimize is "memory"',
            format_bytes(available),
        )
        found, chosen = _place(session, settings, model, tree, link)
    return settings, found, chosen


def _place(
    session: Session, settings: Settings, model: DistributedModel, tree: Tree, link: MeasuredLink | None
) -> tuple[Choice, Chosen | None]:
    if not settings.auto_partition:
        opened, pieces, partitions = place_by_hand(
            tree, model.module, settings.default_partition, settings.partitions
        )
        return Choice(frozenset(opened), pieces, partitions, partitions, [], 0.0), None
    if KINDS[settings.pipeline].measured and session.decided.chosen is None:
        chosen, choice = choose_automatically(tree, settings, link or MeasuredLink(), limit_bytes(session))
        log.info("%s:\n%s", settings.pipeline, chosen.reasons)
        return choice, chosen
    links = FREE if session.decided.chosen is None else session.decided.chosen.links
    return place_units(tree, settings, links, layout(settings, session.decided.chosen)).placement, None


def _check_buffers(tree: Tree, opened: set[str]) -> None:
    """Modules that are split must not replace their buffers: each rank would see that in another order."""
    split = {record.name for record in tree.glue(tree.pieces(opened))}
    faults = [name for name in sorted(tree.trace.replaced_buffers) if name.rpartition(".")[0] in split]
    if faults:
        raise PlacementError(
            f"a module that is split over partitions replaces its buffer {', '.join(faults)} in its own code, and its "
            "microbatches would see each other's half-way: put the module on one partition as a whole, or write into "
            "the buffer in place"
        )


def _plan(
    tree: Tree,
    traced: Trace,
    opened: set[str],
    pieces: list[Piece],
    stages: list[int],
    partitions: list[int],
    costs: list[float],
) -> Plan:
    units = [
        PlannedUnit(
            unit,
            at,
            round(cost, 5),
            _count_writes(traced, unit.name),
            stage,
            *_known(traced, unit.name),
            tied=unit.group or "",
        )
        for unit, stage, at, cost in zip(graph_of(pieces).units, stages, partitions, costs, strict=True)
    ]
    floating = [piece for piece in tree.pieces(opened) if piece.floating]
    units += [
        PlannedUnit(Unit(piece.name, 0, 0, 0, 0), FLOATING, 0.0, 0, None, *_known(traced, piece.name))
        for piece in floating
    ]
    where = {piece.name: at for piece, at in zip(pieces, partitions, strict=True)}
    names = tree.parameter_names
    parameters = {names[id(p)]: where[piece.name] for p, piece in tree.glue_parameters(pieces)}
    if not pieces:  # the model's own code does everything
        parameters = dict.fromkeys(names.values(), 0)
    attributes = own(traced.attributes, [unit.name for unit in units])
    mine = set(names.values())
    read = [
        (name, user or "")
        for name, users in sorted(traced.users.items())
        for user in sorted(users, key=str)
        if name in mine and name.rpartition(".")[0] != user
    ]
    return Plan(
        tuple(units), parameters, _place_buffers(tree, traced, where, pieces), traced.numpy, attributes=attributes,
        toggled=tuple(sorted(traced.toggled)), read=tuple(read), written=tuple(sorted(traced.written_parameters)),
        serial=_must_follow(traced, [unit.name for unit in units]), cast=traced.cast,
    )  # fmt: skip


def _known(traced: Trace, name: str) -> tuple[bool, bool, tuple[str, ...]]:
    """Three facts of the trace: it has called the unit, the unit may use what others leave in what it is given, and the
    unit's hooks that run with it."""
    called = traced.records[name].calls > 0
    return called, not called or name in traced.readers, traced.hooks.get(name, ())


def _must_follow(traced: Trace, units: Sequence[str]) -> bool:
    """True if microbatches must not overlap, because one would see what another writes into parameters and buffers.

    The backward pass may need a parameter as it was, or code outside of its unit writes or reads it. Buffers of no unit
    are looked after by ``pipeline.SharedBuffer``.
    """

    def has_to_itself(name: str) -> bool:
        """True if one unit has it, and nothing else uses it."""
        users = traced.users.get(name, set())
        for unit in units:
            if is_below(name, unit):
                return all(user is not None and (user == unit or is_below(user, unit)) for user in users)
        return False

    found = [name for name, kept in traced.written_parameters.items() if kept or not has_to_itself(name)]
    found += [
        name
        for name in sorted(traced.written_buffers)
        if any(is_below(name, unit) for unit in units) and not has_to_itself(name)
    ]
    if found:
        log.warning(
            "the forward pass writes into %s, which other microbatches would see too early: each microbatch waits for "
            "the one before, as in one process, and partitions do not work at the same time. If it is no weight, let "
            "it be a buffer of the module that writes and uses it", ", ".join(found),
        )  # fmt: skip
    return bool(found)


def _kept_in_attributes(traced: Trace) -> str:
    """The first attribute in which a module keeps something for the next microbatch, in words; empty without any."""
    kept = (each for each in traced.attributes if each.carried and not (each.restored or each.lazy))
    words = "{} keeps its attribute {}, which stays on its rank: make it a buffer"
    return next((words.format(*each.place) for each in kept if each.module or each.in_order), "")


def _count_writes(traced: Trace, name: str) -> int:
    """The number of a unit's calls in a microbatch, if it leaves something to the next one."""
    written = traced.written_buffers | traced.replaced_buffers | traced.written_parameters.keys()
    keeps = any(is_below(buffer, name) for buffer in written) or any(
        each.in_order and each.inside(name) for each in traced.attributes
    )
    return traced.records[name].calls if keeps else 0


def _place_buffers(tree: Tree, traced: Trace, where: dict[str, int], pieces: list[Piece]) -> dict[str, int]:
    """The partition of each buffer that the model writes: its unit's, else that of the unit before its module."""
    buffers = {}
    for buffer in sorted(traced.written_buffers):
        name = buffer
        while name and name not in where:
            name = name.rpartition(".")[0]
        if name in where:
            buffers[buffer] = where[name]
        else:
            buffers[buffer] = where[pieces[0].name] if pieces else 0
    return buffers
