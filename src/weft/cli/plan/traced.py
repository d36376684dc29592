"""What `weft plan` says of a traced model."""

from __future__ import annotations

import json
from dataclasses import asdict

from weft.errors import PlacementError
from weft.graph.model import Graph
from weft.machines.host import Machines
from weft.plan.parallelism.memory import usable_bytes
from weft.plan.parallelism.search import Found, Plan
from weft.plan.parallelism.traced import traced_search
from weft.plan.parallelism.weft_today import command, settings
from weft.report.text import table
from weft.units import format_bytes, format_seconds


def plan_traced(
    graph: Graph, machines: Machines, microbatches: int, memory_bytes: int | None, as_json: bool
) -> str:
    """The fastest ways to run a traced model on machines, as a table or JSON.

    Raises:
        PlacementError: Nothing fits.
    """
    limit = usable_bytes(machines.host.accelerator.memory_bytes) if memory_bytes is None else memory_bytes
    found = traced_search(graph, machines, microbatches, limit)
    if not found.best:
        assert found.nearest is not None
        division, memory = found.nearest
        raise PlacementError(
            f"nothing fits: parameters, gradients and optimizer states alone take {format_bytes(memory.lasting)} a "
            f"rank in the smallest of {found.tried} divisions ({division}), with activations "
            f"{format_bytes(memory.total)}, and a rank has {format_bytes(limit)}: give more machines, or trace with a "
            "smaller microbatch"
        )
    return (
        json.dumps([_json(plan) for plan in found.best], indent=2)
        if as_json
        else _text(found, machines, graph)
    )


def _text(found: Found, machines: Machines, graph: Graph) -> str:
    best = found.best[0]
    rows = [
        (
            f"{plan.division}", format_seconds(plan.seconds), f"{plan.step.bubble / plan.seconds:.0%}",
            f"{plan.step.exposed / plan.seconds:.0%}", format_bytes(plan.memory.total),
        )
        for plan in found.best
    ]  # fmt: skip
    hosts = "1 host" if machines.hosts == 1 else f"{machines.hosts} hosts"
    parts = [
        f"{len(graph)} units, {format_bytes(sum(unit.parameter_bytes for unit in graph))} of parameters, on "
        f"{machines.size} x {machines.host.accelerator.name}, {hosts}; times are those of the device that traced it",
        f"Best of {found.tried} divisions: {best.division}, {best.step.microbatches} microbatches a replica. A step "
        f"takes {format_seconds(best.seconds)}.",
        table(("division", "step", "bubble", "replicas", "memory"), rows, "<>>>>"),
        f"  {command(best.division, best.step.microbatches, machines)}",
    ]
    if found.too_large:
        parts.insert(3, f"{found.too_large} of {found.tried} do not fit")
    return "\n\n".join(parts)


def _json(plan: Plan) -> dict[str, object]:
    return {
        "division": asdict(plan.division),
        "step_s": plan.seconds,
        "memory_bytes": plan.memory.total,
        "settings": settings(plan.division, plan.step.microbatches),
    }
