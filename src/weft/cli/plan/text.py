"""The text of `weft plan`: the recommendation, the best, why not the others, what weft runs, what to try."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weft.cli.plan.storage_tables import services_json, storage
from weft.graph.sizes import Sizes
from weft.machines.catalogue import ACCELERATORS, not_fitted
from weft.plan.parallelism.answer import Answer, Asked, divisible
from weft.plan.parallelism.explain import memory_terms, step_terms
from weft.plan.parallelism.own import because
from weft.plan.parallelism.search import Plan
from weft.plan.parallelism.supported_layouts import cannot, command, settings
from weft.report.run.labels import Table
from weft.report.text import table
from weft.units import format_bytes, format_seconds

SPREAD = "Published steps are 7.1 % off such plans in the mean, peaks of memory 16 %."
"""Beside each answer whose machines were fitted: of rows that they were not fitted on; see `benchmarks/plan`."""


def as_text(found: Answer, compare: bool, explain: bool) -> str:
    """The answer for a terminal."""
    parts = [question(found.asked)]
    if found.search.best:
        parts += [sentence(found), _lines(plans_table(found.asked, found.search.best))]
    if found.own is not None:
        parts.append(own(found))
    parts.append("\n".join(others(found)))
    if (plan := found.runs_today) is not None:
        written = command(plan.division, plan.step.microbatches, found.asked.machines, found.asked.job)
        parts.append(f"{today(found)}\n  {written}")
    if compare or not found.search.best:
        parts += _comparison(found)
    if explain and found.search.best:
        parts += map(_lines, terms(found))
    if found.storage:
        need, tables = storage(found)
        parts += [need, *map(_lines, tables)]
    return "\n\n".join(part for part in parts if part)


def _lines(one: Table) -> str:
    """A table for a terminal."""
    return table(one.headers, one.rows, one.align)


def question(asked: Asked) -> str:
    """The job and its machines, as lines of text."""
    job, machines = asked.job, asked.machines
    device = machines.host.accelerator
    hosts = "1 host" if machines.hosts == 1 else f"{machines.hosts} hosts"
    lines = [
        f"{_many(job.sizes.parameters)} parameters,{_experts(job.sizes)} {job.batch} sequences of {job.sizes.seq} "
        f"tokens a step, {job.precision}, {job.optimizer}",
        f"{machines.size} x {device.name} with {format_bytes(device.memory_bytes)}, on {hosts} ({machines.host.name})",
    ]
    if job.sizes.window and job.sizes.windowed:
        seen = (
            f"tokens in chunks of {job.sizes.window}"
            if job.sizes.chunked
            else f"{job.sizes.window} tokens at most"
        )
        lines.append(
            f"{job.sizes.windowed} of {job.sizes.layers} layers see {seen}: {job.sizes.seen_share:.0%} of all scores"
        )
    assumed = assumptions(asked)
    if assumed:
        lines.append(f"assumed, not fitted: {assumed}; compare these times, do not rely on them")
    return "\n".join(lines)


def assumptions(asked: Asked) -> str:
    """The parts of times that were neither fitted to published steps nor measured; empty if there are none."""
    found = [not_fitted(asked.machines.host.accelerator, asked.job.precision)]
    found += ["all that experts take (no published step has them)"] if asked.job.sizes.experts else []
    return " and ".join(each for each in found if each)


def _experts(sizes: Sizes) -> str:
    """The parameters of a mixture of experts that a token meets; empty for other models."""
    experts = sizes.experts
    if experts is None:
        return ""
    return f" of which a token meets {_many(sizes.active_parameters)} ({experts.per_token} of {experts.count} experts),"


def _many(number: int) -> str:
    """A number of parameters as people say it."""
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def sentence(found: Answer) -> str:
    """The best division, and what it gives."""
    asked, best, few = found.asked, found.search.best[0], found.microbatches
    words = (
        f"Best of {found.search.tried} divisions: {best.division}. A step takes {format_seconds(best.seconds)}, "
        f"{asked.tokens_per_s(best):,.0f} tokens/s, {asked.share_of_peak(best):.0%} of the peak."
    )
    if best.division.pipeline > 1 and best.step.microbatches < few:
        words += f" The bubble is under 5 % from {few} microbatches on; it has {best.step.microbatches}."
    fitted = asked.machines.host.accelerator.name in ACCELERATORS and not assumptions(asked)
    return f"{words} {SPREAD}" if fitted else words


def own(found: Answer) -> str:
    """The division that was asked for beside the best one."""
    assert found.own is not None
    plan, asked = found.own.plan, found.asked
    memory = format_bytes(plan.memory.total)
    words = f"Yours: {plan.division}. A step takes {format_seconds(plan.seconds)}, {memory} a rank"
    if not found.own.fits:
        words += f", which is {format_bytes(plan.memory.total - asked.limit_bytes)} more than it has"
    if not found.search.best:
        return f"{words}."
    best = found.search.best[0]
    if plan.seconds <= best.seconds:
        return f"{words}; the best that fits takes {format_seconds(best.seconds)}."
    why = because(asked.job, plan, best)
    return (
        f"{words}; the best takes {format_seconds(best.seconds)}{f', because of yours {why}' if why else ''}."
    )


def nothing_fits(found: Answer) -> str:
    """Why nothing fits, what is lacking, and how many hosts would do, in one sentence or two."""
    asked = found.asked
    assert found.search.nearest is not None
    division, memory = found.search.nearest
    words = (
        f"nothing fits: parameters, gradients and optimizer states alone take {format_bytes(memory.lasting)} a rank in "
        f"the smallest of {found.search.tried} divisions ({division}), with activations {format_bytes(memory.total)}, "
        f"and a rank has {format_bytes(asked.limit_bytes)}: it lacks {format_bytes(memory.total - asked.limit_bytes)}."
    )
    if found.changes:
        fits = [
            f"{what} (a step of {format_seconds(plan.seconds)}, {format_bytes(plan.memory.total)})"
            for what, plan in found.changes
        ]
        words += f" What would fit, by itself: {'; '.join(fits)}."
    if found.hosts_that_fit is not None:
        batch = divisible(asked.job.batch, found.hosts_that_fit * asked.machines.host.accelerators)
        more = "" if batch == asked.job.batch else f", with a batch of {batch}"
        words += f" {found.hosts_that_fit} such hosts would do{more}."
    return words


def plans_table(asked: Asked, plans: list[Plan], caption: str = "") -> Table:
    """A table of plans, each with its figures; columns that say nothing are left out."""
    rows = []
    for plan in plans:
        hours, cost = asked.hours(plan), asked.cost(plan)
        rows.append(
            (
                f"{plan.division}",
                format_seconds(plan.seconds),
                f"{asked.tokens_per_s(plan):,.0f}",
                f"{asked.share_of_peak(plan):.0%}",
                format_bytes(plan.memory.total),
                "" if hours is None else _long(hours),
                "" if cost is None else f"{cost:,.0f}",
                "" if cannot(asked.job, plan.division) else "yes",
            )
        )
    headers = ("division", "step", "tokens/s", "of peak", "memory", "to the target", "cost", "weft today")
    kept = [at for at in range(len(headers)) if any(row[at] for row in rows)]
    aligned = "".join("<>>>>>><"[at] for at in kept)
    shown = [tuple(row[at] for at in kept) for row in rows]
    return Table(caption, tuple(headers[at] for at in kept), shown, aligned)


def _long(hours: float) -> str:
    """A duration of hours or days."""
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"


def others(found: Answer) -> list[str]:
    """Why other divisions fell out, and why weft runs none of the rest if that is so; a line each."""
    lines = []
    search = found.search
    if search.best and found.runs_today is None:
        lines.append(f"weft runs none of these today: {cannot(found.asked.job, search.best[0].division)}")
    if search.too_large and search.best:
        assert search.nearest is not None
        division, memory = search.nearest
        lines.append(
            f"{search.too_large} of {search.tried} do not fit into {format_bytes(found.asked.limit_bytes)}; "
            f"the nearest lacks {format_bytes(memory.total - found.asked.limit_bytes)}: {division}"
        )
    lines += [
        f"cannot be: {why}" + (f" ({count} times)" if count > 1 else "")
        for why, count in search.refused.items()
    ]
    return lines


def today(found: Answer) -> str:
    """The sentence about the plan that weft runs today."""
    plan, asked = found.runs_today, found.asked
    assert plan is not None
    best = found.search.best[0]
    why = cannot(asked.job, best.division)
    head = "weft runs the best one today:" if not why else (
        f"weft cannot run the best one ({why}); the best that it can takes {format_seconds(plan.seconds)} "
        f"({plan.seconds / best.seconds:.2f} times as long), {format_bytes(plan.memory.total)}: {plan.division}"
    )  # fmt: skip
    more = "\nwith activation checkpoints around every layer" if plan.division.recompute == "full" else ""
    return f"{head}{more}"


def _comparison(found: Answer) -> list[str]:
    """The best of each kind, and what to try in the guide's order."""
    parts = []
    if found.search.of_kind:
        parts.append("The best of each kind\n\n" + _lines(kinds_table(found)))
    parts.append("What to try, in this order\n\n" + _lines(guide_table(found)))
    return parts


def kinds_table(found: Answer) -> Table:
    """The best of each kind, the fastest first."""
    plans = sorted(found.search.of_kind.values(), key=lambda plan: plan.seconds)
    return plans_table(found.asked, plans, "The best of each kind")


def guide_table(found: Answer) -> Table:
    """A table of what to try, in order."""
    rows = [
        (str(number), advice.what, format_bytes(advice.memory_bytes), "yes" if advice.fits else "no",
         format_seconds(advice.step_s))
        for number, advice in enumerate(found.guide, 1)
    ]  # fmt: skip
    return Table("What to try, in this order", ("", "try", "memory", "fits", "step"), rows, "><><>")


def terms(found: Answer) -> list[Table]:
    """The terms of the best one's step and memory."""
    asked, plan = found.asked, found.search.best[0]
    step = Table("", ("term of the step", "", "formula"), [
        (name, format_seconds(seconds), formula) for name, seconds, formula in step_terms(asked.job, plan)
    ], "<>")  # fmt: skip
    memory = Table("", ("memory of the fullest rank", "", "formula"), [
        (name, format_bytes(size), formula) for name, size, formula in memory_terms(asked.job, plan)
    ], "<>")  # fmt: skip
    return [step, memory]


def as_json(found: Answer) -> dict[str, Any]:
    """The answer as JSON."""
    asked, search = found.asked, found.search
    nearest = search.nearest
    return {
        "parameters": asked.job.sizes.parameters,
        "active_parameters": asked.job.sizes.active_parameters,
        "accelerators": asked.machines.size,
        "not_fitted": assumptions(asked),
        "best": [_plan_json(asked, plan) for plan in search.best],
        "of_kind": {kind: _plan_json(asked, plan) for kind, plan in search.of_kind.items()},
        "runs_today": None if found.runs_today is None else _plan_json(asked, found.runs_today),
        "tried": search.tried,
        "fits": search.fits,
        "too_large": search.too_large,
        "nearest": None if nearest is None else {
            "division": asdict(nearest[0]),
            "lacks_bytes": nearest[1].total - asked.limit_bytes,
        },
        "refused": search.refused,
        "hosts_that_fit": found.hosts_that_fit,
        "own": None if found.own is None else {**_plan_json(asked, found.own.plan), "fits": found.own.fits},
        "changes": [{"change": what, **_plan_json(asked, plan)} for what, plan in found.changes],
        "guide": [asdict(advice) for advice in found.guide],
        "storage_given": [asdict(one) for one in found.given],
        "storage": [{"first": asdict(first), "later": asdict(later)} for first, later in found.storage],
        "storage_services": [services_json(one) for one in found.services],
    }  # fmt: skip


def _plan_json(asked: Asked, plan: Plan) -> dict[str, Any]:
    why = cannot(asked.job, plan.division)
    return {
        "division": asdict(plan.division),
        "step_s": plan.seconds,
        "tokens_per_s": asked.tokens_per_s(plan),
        "share_of_peak": asked.share_of_peak(plan),
        "memory_bytes": plan.memory.total,
        "hours": asked.hours(plan),
        "cost": asked.cost(plan),
        "step": {name: seconds for name, seconds, _ in step_terms(asked.job, plan)},
        "memory": {name: size for name, size, _ in memory_terms(asked.job, plan)},
        "weft_cannot": why,
        "settings": {} if why else settings(plan.division, plan.step.microbatches, asked.job),
    }
