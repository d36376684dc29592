"""The text of `weft plan` about a traced model."""

from __future__ import annotations

from dataclasses import asdict

from weft.cli.plan.page import machine_table
from weft.errors import PlacementError
from weft.graph.model import Graph
from weft.machines.host import Machines
from weft.plan.parallelism.memory import usable_bytes
from weft.plan.parallelism.search import Found, Plan
from weft.plan.parallelism.stage_costs import traced_stage_costs
from weft.plan.parallelism.supported_layouts import command, settings
from weft.plan.parallelism.traced import MOMENTS, traced_search
from weft.report.plan.page import PlanReport, ToWrite
from weft.report.plan.pipeline import pipeline
from weft.report.run.labels import Table
from weft.report.text import table
from weft.units import format_bytes, format_seconds

AGAIN = (
    "with activation checkpoints around every block: the modules that a number tells apart, such as layers.0"
)


def limit_of(machines: Machines, memory_bytes: int | None) -> float:
    """The bytes of a device that may be used."""
    return usable_bytes(machines.host.accelerator.memory_bytes) if memory_bytes is None else memory_bytes


def plans_of(graph: Graph, machines: Machines, microbatches: int, limit_bytes: float) -> Found:
    """The fastest ways to run a traced model on machines.

    Raises:
        PlacementError: Nothing fits.
    """
    found = traced_search(graph, machines, microbatches, limit_bytes)
    if not found.best:
        assert found.nearest is not None
        division, memory = found.nearest
        raise PlacementError(
            f"nothing fits: parameters, gradients and optimizer states alone take {format_bytes(memory.lasting)} a "
            f"rank in the smallest of {found.tried} divisions ({division}), with activations "
            f"{format_bytes(memory.total)}, and a rank has {format_bytes(limit_bytes)}: give more machines, or trace "
            "with a smaller microbatch"
        )
    return found


def traced_text(found: Found, machines: Machines, graph: Graph) -> str:
    """The answer for a terminal."""
    shown = plans_table(found.best)
    again = f"{AGAIN}\n" if found.best[0].division.recompute == "full" else ""
    parts = [
        question(machines, graph),
        sentence(found),
        table(shown.headers, shown.rows, shown.align),
        f"{again}  {_to_write(found, machines).command}",
    ]
    parts[3:3] = _others(found)
    return "\n\n".join(parts)


def question(machines: Machines, graph: Graph) -> str:
    """The job and its machines, as text."""
    hosts = "1 host" if machines.hosts == 1 else f"{machines.hosts} hosts"
    return (
        f"{len(graph)} units, {format_bytes(sum(unit.parameter_bytes for unit in graph))} of parameters, on "
        f"{machines.size} x {machines.host.accelerator.name}, {hosts}; times are those of the device that traced it"
    )


def sentence(found: Found) -> str:
    """The best division, and what it gives."""
    best = found.best[0]
    return (
        f"Best of {found.tried} divisions: {best.division}, {best.step.microbatches} microbatches a replica. A step "
        f"takes {format_seconds(best.seconds)}."
    )


def plans_table(plans: list[Plan], caption: str = "") -> Table:
    """A table of plans, each with its figures."""
    rows = [
        (
            f"{plan.division}", format_seconds(plan.seconds), f"{plan.step.bubble / plan.seconds:.0%}",
            f"{plan.step.exposed / plan.seconds:.0%}", format_bytes(plan.memory.total),
        )
        for plan in plans
    ]  # fmt: skip
    return Table(caption, ("division", "step", "bubble", "replicas", "memory"), rows, "<>>>>")


def _others(found: Found) -> list[str]:
    return [f"{found.too_large} of {found.tried} do not fit"] if found.too_large else []


def _to_write(found: Found, machines: Machines) -> ToWrite:
    best = found.best[0]
    one, microbatches = best.division, best.step.microbatches
    again = one.recompute == "full"
    return ToWrite(
        "weft runs the best one today:" + (f"\n{AGAIN}" if again else ""),
        command(one, microbatches, machines),
        settings(one, microbatches),
        f"A step of each replica: {microbatches} microbatches like the one that was traced.",
    )


def traced_report(found: Found, machines: Machines, graph: Graph, limit_bytes: float) -> PlanReport:
    """The page's value."""
    best = found.best[0]
    what, _, times = question(machines, graph).partition("; ")
    kinds = sorted(found.of_kind.values(), key=lambda plan: plan.seconds)
    return PlanReport(
        f"{what}\n{times}",
        sentence(found),
        found,
        limit_bytes,
        _to_write(found, machines),
        plans_table(found.best),
        plans_table(kinds, "The best of each kind"),
        others=[*_others(found), *found.refused],
        pipeline=pipeline(best, traced_stage_costs(graph, machines, best.division)),
        assumptions=[
            f"The optimizer keeps {MOMENTS} numbers for each parameter.",
            "Replicas add up gradients, and stages pass tensors on, over the links of the machine below.",
        ],
        machine=machine_table(machines),
    )


def traced_json(found: Found) -> list[dict[str, object]]:
    """The answer as JSON."""
    return [
        {
            "division": asdict(plan.division),
            "step_s": plan.seconds,
            "memory_bytes": plan.memory.total,
            "settings": settings(plan.division, plan.step.microbatches),
        }
        for plan in found.best
    ]
