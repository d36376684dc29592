"""Memory that a plan says, against the peak that weft's own runs have on this machine's processors.

    python -m benchmarks.plan.memory --models gpt,t5

The GPT is planned by its sizes, the others as they were traced. Measured is the peak of resident memory of the fullest
rank in usual steps, above what was resident before the model was built (`trainee.py`), less what a rank takes besides
any model (`besides`). What a plan reserves for that is left out. Ranks keep to their schedule
(`optimize` is "memory", with no weight of memory in the split). With --deterministic splits repeat.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import mean

from benchmarks import machine
from benchmarks.plan.runs import BATCH, NAMES, gpt_sizes, run, task_of, traced
from benchmarks.turns import options
from weft.graph.model import Graph
from weft.machines.catalogue import host_of
from weft.machines.host import Machines
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.memory import Memory, memory_of, with_copies
from weft.plan.parallelism.step import StepTimes
from weft.plan.parallelism.traced import traced_plan

MIB = 2**20
TARGET = 0.10
KEEPING = {"optimize": "memory", "memory_weight": 0.0}
SAMPLES = 2
"""Of a microbatch."""
HEADER = (
    "| model | division | parameters | gradients | states | activations | moment | predicted MiB | measured MiB "
    "| error | its parameters |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def divisions(ranks: int) -> Iterator[Division]:
    """Pipelines, replicas and both; with states shared, and with blocks computed again."""
    for again in ("none", "full"):
        yield Division(pipeline=ranks, microbatch=SAMPLES, recompute=again)
        if ranks > 2:
            yield Division(data=2, pipeline=ranks // 2, microbatch=SAMPLES, recompute=again)
            yield Division(
                data=2, pipeline=ranks // 2, microbatch=SAMPLES, recompute=again, sharded="optimizer"
            )
        else:
            yield Division(data=ranks, microbatch=SAMPLES, recompute=again)
            yield Division(data=ranks, microbatch=SAMPLES, recompute=again, sharded="optimizer")


@cache
def besides(division: Division, deterministic: bool) -> float:
    """What a rank takes besides the model, whatever its depth: code of libraries, what they pack operands in, rings to
    other ranks. Of a GPT with a block a rank it is what the plan's formulas do not say."""
    shallow = replace(division, recompute="none", sharded="none")
    if shallow != division:
        return besides(shallow, deterministic)
    blocks = division.pipeline
    task = task_of("gpt", division, BATCH // SAMPLES // division.data, False, 2, lean=True)
    found = run(replace(task, blocks=blocks), division, **KEEPING, deterministic=deterministic)
    if isinstance(found, str):
        raise SystemExit(f"a shallow model could not be trained: {found}")
    own = predicted("gpt", None, division, False, deterministic, blocks)
    return max(found.memory_bytes) - (own.total - own.reserved)


def predicted(
    model: str,
    graph: Graph | None,
    division: Division,
    small: bool,
    deterministic: bool = False,
    blocks: int = 0,
) -> Memory:
    """What a plan says: by the sizes of the GPT, or of a traced model. Deterministic replicas copy their gradients."""
    machines = Machines(host_of("cpu:1", division.ranks), 1)
    if graph is not None:
        plan = traced_plan(graph, division, machines, BATCH // SAMPLES // division.data)
        return with_copies(plan.memory, division, deterministic)
    job = Job(gpt_sizes(small, blocks), BATCH, "fp32", eager=True)
    return memory_of(job, division, StepTimes(job, machines).shares(division), deterministic)


def row(
    model: str, division: Division, found: Memory, measured: float, parameters: float
) -> tuple[str, float]:
    """A line of the table, and the error; `parameters` are those that the fullest rank really has."""
    own = found.total - found.reserved
    error = own / measured - 1
    parts = (found.parameters, found.gradients, found.states, found.activations, found.moment, own, measured)
    told = " | ".join(f"{part / MIB:.0f}" for part in parts)
    return f"| {model} | {division} | {told} | {error:+.0%} | {parameters / MIB:.0f} |", error


def verdict(errors: list[float]) -> str:
    """The mean and the largest error, against the target."""
    sizes = [abs(error) for error in errors]
    within = sum(size <= TARGET for size in sizes)
    return (
        f"{len(sizes)} runs: {mean(sizes):.0%} in the mean, {max(sizes):.0%} at most, bias {mean(errors):+.0%}; "
        f"{within} within {TARGET:.0%}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plan.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(NAMES), help=f"comma-separated, of {', '.join(NAMES)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="tiny models: only to see that everything runs")
    parser.add_argument(
        "--deterministic", action="store_true", help="by counts in place of times, so that splits repeat"
    )
    given = parser.parse_args(arguments)
    errors, failed = [], False
    print(f"{machine.machine_name()}\n\n{HEADER}", flush=True)
    for model in options.names(parser, given.models, NAMES, "model"):
        graph = None if model == "gpt" else traced(model, BATCH // SAMPLES, 1, given.small)
        for division in (each for ranks in given.ranks for each in divisions(ranks)):
            task = task_of(
                model, division, BATCH // SAMPLES // division.data, given.small, given.steps, lean=True
            )
            measured = run(task, division, **KEEPING, deterministic=given.deterministic)
            if isinstance(measured, str):
                failed = True
                print(f"| {model} | {division} | {measured} |", flush=True)
                continue
            found = predicted(model, graph, division, given.small, given.deterministic)
            fullest = max(zip(measured.memory_bytes, measured.parameter_bytes, strict=True))
            line, error = row(
                model, division, found, fullest[0] - besides(division, given.deterministic), fullest[1]
            )
            errors.append(error)
            print(line, flush=True)
    if errors:
        print(f"\n{verdict(errors)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
