"""Whether the plan that `weft plan` calls the best is the best of those that were run, and how far its steps are off.

    python -m benchmarks.plan.choice --models gpt --ranks 2

This machine is measured with as many ranks (`weft plan --measure`). The GPT is planned by its sizes; the others are
traced by as many processes at once, as they will train. The plans that are called best are run in turn.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks import machine
from benchmarks.plan.runs import BATCH, NAMES, gpt_sizes, run, task_of, traced, typical_s
from benchmarks.turns import options
from weft.machines.host import Machines
from weft.machines.machine_file import host_from_json
from weft.plan.parallelism.job import Job
from weft.plan.parallelism.search import Found, Plan, search
from weft.plan.parallelism.supported_layouts import cannot
from weft.plan.parallelism.traced import traced_search

CLOSE, RIGHT = 0.05, 0.10
SAMPLES = 2
"""Of a microbatch of a traced model."""
HEADER = (
    "| model | ranks | plan | predicted ms | measured ms | error | undisturbed steps |\n"
    "| --- | ---: | --- | ---: | ---: | ---: | ---: |"
)


def measured_machine(ranks: int, patience_s: float) -> Machines:
    """This machine, as `weft plan --measure` sees it."""
    machine.wait_until_quiet(patience_s)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "mine.json")
        command = [sys.executable, "-m", "weft", "plan", "--measure", str(out), "-n", str(ranks)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return Machines(host_from_json(out.read_text()), 1)


def candidates(found: Found, most: int) -> list[Plan]:
    """The plans to run: the best that weft can run, and the best of each kind."""
    runs = [plan for plan in [*found.best, *found.of_kind.values()] if not cannot(None, plan.division)]
    unlike: dict[str, Plan] = {}
    for plan in runs:
        unlike.setdefault(str(plan.division), plan)
    kinds = [plan for plan in unlike.values() if plan in found.of_kind.values()]
    rest = [plan for plan in unlike.values() if plan not in kinds]
    return sorted([*kinds, *rest][:most], key=lambda plan: plan.seconds)


def plans(model: str, machines: Machines, small: bool, most: int) -> list[Plan]:
    """What `weft plan` says, the fastest first."""
    if model == "gpt":
        return candidates(search(Job(gpt_sizes(small), BATCH, "fp32", eager=True), machines), most)
    graph = traced(model, BATCH // SAMPLES, machines.size, small)
    limit = 0.96 * machines.host.accelerator.memory_bytes
    found = candidates(traced_search(graph, machines, BATCH // SAMPLES, limit), most)
    return [replace(plan, division=replace(plan.division, microbatch=SAMPLES)) for plan in found]


def chosen(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """By how much the plan that is called best is slower than the best that was run, and how far its step is off.

    >>> chosen([(1.0, 1.1), (1.2, 1.0), (2.0, 3.0)])
    (0.10000000000000009, -0.09090909090909094)
    """
    predicted_s, measured_s = min(times)
    return measured_s / min(measured for _, measured in times) - 1, predicted_s / measured_s - 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plan.choice", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(NAMES), help=f"comma-separated, of {', '.join(NAMES)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--plans", type=int, default=6, help="plans of each model that are run")
    parser.add_argument("--turns", type=int, default=2, help="how often each of them runs")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--patience", type=float, default=20.0, help="seconds to wait for a quiet machine before each run"
    )
    parser.add_argument("--small", action="store_true", help="tiny models: only to see that everything runs")
    given = parser.parse_args(arguments)
    models = options.names(parser, given.models, NAMES, "model")
    lines, failed = [], False
    print(f"{machine.machine_name()}\n\n{HEADER}", flush=True)
    for ranks in given.ranks:
        machines = measured_machine(ranks, given.patience)
        for model in models:
            asked = plans(model, machines, given.small, given.plans)
            seen: list[list[tuple[float, float]]] = [[] for _ in asked]
            for _ in range(given.turns):
                for plan, steps in zip(asked, seen, strict=True):
                    task = task_of(model, plan.division, plan.step.microbatches, given.small, given.steps)
                    machine.wait_until_quiet(given.patience)
                    found = run(task, plan.division)
                    if isinstance(found, str):
                        failed = True
                        print(f"{model}, {plan.division}: {found}", file=sys.stderr)
                    else:
                        steps.extend(found.steps)
            times = []
            for plan, steps in zip(asked, seen, strict=True):
                if steps:
                    own, quiet = typical_s(steps)
                    times.append((plan.seconds, own))
                    told = f"{1e3 * plan.seconds:.0f} | {1e3 * own:.0f} | {plan.seconds / own - 1:+.0%}"
                    print(
                        f"| {model} | {ranks} | {plan.division} | {told} | {quiet} of {len(steps)} |",
                        flush=True,
                    )
            if times:
                lines.append((model, ranks, *chosen(times)))
    print("\n| model | ranks | slower than the best | error of its step |\n| --- | ---: | ---: | ---: |")
    for model, ranks, slower, error in lines:
        print(f"| {model} | {ranks} | {slower:.1%} | {error:+.1%} |")
    if lines:
        close = sum(slower <= CLOSE for _, _, slower, _ in lines)
        right = sum(abs(error) <= RIGHT for _, _, _, error in lines)
        print(
            f"\n{close} of {len(lines)} within {CLOSE:.0%} of the best that was run, {right} steps within {RIGHT:.0%} "
            f"({mean(abs(error) for *_, error in lines):.0%} in the mean)"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
