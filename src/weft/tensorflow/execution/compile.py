"""From a step that was called to what this rank runs of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from weft.analysis.run import Unit as Recorded
from weft.config import Settings
from weft.partition.cost import memory_bytes
from weft.plan.chosen import most_in_flight
from weft.report.placement import ModelPlacement
from weft.report.text import PlacementRow
from weft.tensorflow import private
from weft.tensorflow.execution.executor import Runnable
from weft.tensorflow.execution.functions import Cutter, PhaseFunction
from weft.tensorflow.execution.messages import Watcher
from weft.tensorflow.execution.program import make_program
from weft.tensorflow.session.session import Session, name_of
from weft.tensorflow.split.alike import at_one_place, fixed_of, units_of, with_twins
from weft.tensorflow.split.decide import Decision, agree
from weft.tensorflow.split.phases import EVERYWHERE, NotInOrder, Phases, place_operations
from weft.tensorflow.split.units import Units
from weft.tensorflow.trace.capture import Capture, capture
from weft.tensorflow.trace.operations import Value
from weft.tensorflow.trace.returned import Returned

log = logging.getLogger("weft")


def compile_phases(cutter: Cutter, runnable: Runnable) -> dict[int, str]:
    """Have XLA compile a rank's phases; those that it cannot compile, by position, with XLA's reason.

    These run without XLA, and the log says so. The variables of the rank have their values when this is called.
    """
    found: dict[int, str] = {}
    for position, function in runnable.functions.items():
        reason = find_hindrance(function)
        if reason is None:
            runnable.functions[position] = cutter.function(function.phase, compiled=True)
        elif reason:
            found[position] = reason
    for text in describe(runnable, found):
        log.warning("%s", text)
    return found


def find_hindrance(function: PhaseFunction) -> str | None:
    """Why XLA does not compile a phase; empty where there is nothing to compile, None if it does."""
    if function.function is None:
        return ""
    signature = (*function.function.inputs, *function.function.outputs)
    if any(tensor.dtype in (tf.variant, tf.string) for tensor in signature):
        return "it takes or hands on a text or a list of tensors, the states of a loop say"
    return private.xla_hindrance(function.function)


def describe(runnable: Runnable, hindered: Mapping[int, str]) -> list[str]:
    """The phases that run without XLA, in words; those with one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for position, reason in sorted(hindered.items()):
        kind, stage = runnable.describe(position)
        what = f"the {'forward' if kind == 'F' else 'backward'} pass of stage {stage}"
        by_reason.setdefault(reason, []).append(what if stage >= 0 else "what is outside of the stages")
    return [
        f"XLA does not compile {', '.join(names)}, which run without it: {reason}"
        for reason, names in by_reason.items()
    ]


@dataclass
class Compiled:
    """A step for one kind of arguments, ready to run on this rank.

    Attributes:
        capture: The step, traced.
        units: Its units.
        decision: Where they went.
        phases: When and where each operation runs.
        cutter: Cuts functions out of it.
        runnable: This rank's part.
        owners: The partition of each variable of a model, by its key.
        placement: Where the units lie, for people.
        number: Which of the job's traced steps this is.
        prove: Compares microbatches of the first batch with the whole of it, if that is wanted.
        proof: Compares the first batch with one process, if that is wanted.
        returned: What is known of each tensor that the step returns.
    """

    capture: Capture
    units: Units
    decision: Decision
    phases: Phases
    cutter: Cutter
    runnable: Runnable
    owners: dict[int, int]
    placement: ModelPlacement
    number: int = 0
    prove: Callable[[Sequence[Any]], None] | None = None
    proof: Watcher | None = None
    returned: list[Returned] = field(default_factory=list)

    @property
    def bound(self) -> bool:
        """True if the step takes a tensor of the graph that it was called in, and can run in that one only."""
        return any(private.is_symbolic(tensor) for tensor in self.capture.feeds.values())

    def described(self) -> list[Recorded]:
        """The units, for a recording."""
        return [
            Recorded(
                unit.name, partition, unit.forward_ms / 1e3, unit.backward_ms / 1e3, unit.parameter_bytes
            )
            for unit, partition in zip(self.units.graph.units, self.decision.partitions, strict=True)
        ]

    def feeds(self, arguments: list[Any]) -> dict[int, Any]:
        """The tensors of a microbatch, and those from outside of the step, by the operations that stand for them."""
        found = dict(zip(self.capture.arguments, arguments, strict=True))
        return found | self.capture.feeds


def compile_step(
    session: Session,
    name: str,
    function: Callable[..., Any],
    specs: list[tf.TensorSpec],
    microbatches: int,
    models: list[Any],
) -> Compiled:
    """Trace a step, decide where its parts go, and cut out those of this rank; collective over all ranks.

    ``models``: those whose variables belong to one partition each.
    """

    captured = capture(name, function, specs, lambda handle: names_of(models).get(private.key_of(handle)))
    owners = {key: at for model in models for key, at in model.owners.items()}
    keys = [private.key_of(handle) for handle in captured.variables]
    known = {number: owners[key] for number, key in enumerate(keys) if key in owners}
    units = _units(session, captured, keys, known)
    twins = with_twins(owners, models if session.settings.auto_partition else ())
    wished = {number: twins[key] for number, key in enumerate(keys) if key in twins}
    fixed = fixed_of(captured.record, known, wished)
    decision = agree(session, units, captured.record, fixed, microbatches)
    phases = _place(session, captured, units, decision, known)
    rank = session.position("pp")
    order = captured.record.in_order()
    program = make_program(captured.record, phases, rank, units.replicated, order)
    cutter = Cutter(captured)
    functions = {position: cutter.function(phase) for position, phase in program.phases.items()}
    tensors = {
        value: _spec(captured, value) for phase in program.phases.values() for _, value, _ in phase.receives
    }
    runnable = Runnable(
        captured.record,
        program,
        functions,
        program.order(decision.schedule.ranks[rank], microbatches, phases),
        len(phases.stages),
        any(operation.gradient_of >= 0 for operation in captured.record.operations),
        tensors,
    )
    found = {
        key: phases.owner[number] for number, key in enumerate(keys) if phases.owner[number] != EVERYWHERE
    }
    placement = describe_placement(session.settings, units, decision)
    return Compiled(captured, units, decision, phases, cutter, runnable, owners | found, placement)


def _units(session: Session, captured: Capture, keys: list[int], known: dict[int, int]) -> Units:
    """The units of a step; those of models that it calls lie alike where the models are alike."""
    pairs: list[tuple[int, int]] = []
    if session.settings.auto_partition and session.settings.partitions > 1:
        number = {key: at for at, key in enumerate(keys)}
        called = {id(model): model for model, _, _ in captured.marks.models}.values()
        pairs = [
            (number[one], number[other])
            for one, other in at_one_place(called)
            if one in number and other in number
        ]
    return units_of(captured.record, pairs, known, session.settings.partitions)


def names_of(models: list[Any]) -> dict[int, str]:
    """The names of all variables of models, by their keys."""
    return {
        private.key_of(private.handle_of(each)): name_of(each)
        for model in models
        for each in model.all_variables()
    }


def describe_placement(settings: Settings, units: Units, decision: Decision) -> ModelPlacement:
    """Where the units lie, for people."""
    held = most_in_flight(settings)
    rows = tuple(
        PlacementRow(
            unit.name, at, unit.parameters, unit.parameter_bytes, unit.forward_ms, unit.backward_ms,
            memory_bytes(unit, held),
        )
        for unit, at in zip(units.graph.units, decision.partitions, strict=True)
    )  # fmt: skip
    optimize = "" if not settings.auto_partition else "memory" if settings.optimize == "memory" else "speed"
    return ModelPlacement(rows, settings.partitions, optimize, settings.microbatch_count)


def _place(
    session: Session, captured: Capture, units: Units, decision: Decision, known: dict[int, int]
) -> Phases:
    def place(stages: Sequence[int]) -> Phases:
        return place_operations(
            captured.record,
            units,
            session.settings.partitions,
            decision.stage_of_unit,
            decision.partitions,
            stages,
            known,
        )

    try:
        phases = place(decision.stages)
    except NotInOrder as error:
        log.warning(
            "the step does not go forward through the model and then backward (%s takes what comes later): its "
            "microbatches run one after the other", error,
        )  # fmt: skip
        return place(())
    if phases.serial and session.rank == 0:
        log.warning("%s: each microbatch waits for the one before, as in one process", phases.serial)
    return phases


def _spec(captured: Capture, value: Value) -> tf.TensorSpec:
    tensor = captured.operations[value.operation].outputs[value.output]
    return tf.TensorSpec(tensor.shape, tensor.dtype)
