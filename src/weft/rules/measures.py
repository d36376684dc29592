"""Measures of a run that several rules use, and hosts one by one."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from weft.analysis.analysis import LEAVE_OUT, Analysis
from weft.analysis.parts import Parts
from weft.analysis.run import Device, Sample, Step
from weft.rules.rule import Finding, Rule, Status
from weft.schedule import CHUNKS, make
from weft.simulate import StageCost, simulate
from weft.timeline import WORK
from weft.units import format_seconds

BUSY = (*WORK, "optimizer", "collector", "prepare", "step")
"""Kinds of spans in which the thread of a step wants its core; in "step" nothing else is recorded, that is Python."""
CLOCKS = 0.1
"""The share of a forward pass by which clocks may differ where waits are judged."""
LOSSES = 30.0
"""So often a core is lost for each second of work without it where other processes take it."""
LEAST_LOST = 0.05
"""The share of work without its core from which it is reported."""
MOST_SIMULATED = 4096
"""Partitions times microbatches up to which the ideal of a schedule is simulated."""


def percent(share: float) -> str:
    """A share as people read it.

    >>> percent(0.2727), percent(0.002)
    ('27.3 %', '0.2 %')
    """
    return f"{100 * share:.1f} %"


def number_of(analysis: Analysis, setting: str, otherwise: int = 1) -> int:
    """A setting that is a whole number of at least 1."""
    value = analysis.setting(setting)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


def partitions(analysis: Analysis) -> int:
    """The number of partitions of the model."""
    return max(1 + max(analysis.partitions.values(), default=0), number_of(analysis, "partitions"))


def microbatches(analysis: Analysis) -> int:
    """Into how many microbatches a mini-batch is cut; what the spans show where no setting says so."""
    seen = 1 + max((span.microbatch for span in analysis.timeline.spans if span.kind == "F"), default=0)
    return number_of(analysis, "microbatches", max(1, seen))


def of_partition(analysis: Analysis) -> dict[int, list[int]]:
    """The ranks with a timeline of each partition."""
    found: dict[int, list[int]] = defaultdict(list)
    for rank in analysis.typical:
        found[analysis.partitions[rank]].append(rank)
    return dict(sorted(found.items()))


def clocks_differ(analysis: Analysis) -> float:
    """By how many seconds the ranks' clocks may differ, where that is as large as waits; else 0."""
    cut, error_s = microbatches(analysis), analysis.run.clock_error_s
    forward_s = mean(each.forward / cut for each in analysis.typical.values())
    return error_s if error_s > CLOCKS * forward_s else 0.0


def share(analysis: Analysis, part: Callable[[Parts], float]) -> float:
    """The share of a usual step that a part takes, the mean over ranks."""
    found = [part(each) / each.total for each in analysis.typical.values() if each.total > 0]
    return statistics.fmean(found) if found else 0.0


def share_of_all(
    analysis: Analysis, seconds: Callable[[Step], float], least: float = 0.0
) -> tuple[float, list[int]]:
    """The share of a run, without its first step, that something takes on the rank with most of it; and in which steps
    it takes more than the least share.

    Every step counts, whether its spans were kept or not.
    """
    worst, steps = 0.0, set()
    for rank in analysis.ranks:
        own = analysis.run.steps.get(rank, ())[LEAVE_OUT:]
        taken = [
            (step.step, seconds(step), period_s) for step, period_s in zip(own, _periods(own), strict=True)
        ]
        steps |= {number for number, took_s, period_s in taken if took_s > least * period_s}
        total_s = sum(period_s for _, _, period_s in taken)
        worst = max(worst, sum(took_s for _, took_s, _ in taken) / total_s if total_s > 0 else 0.0)
    return min(1.0, worst), sorted(steps)


def _periods(steps: Sequence[Step]) -> list[float]:
    """Each step's time to the begin of the next one; of the last, and where some are missing, what is known of it."""
    found = [step.step_s + step.optimizer_s + step.checkpoint_s for step in steps]
    for at, (step, after) in enumerate(pairwise(steps)):
        if after.step == step.step + 1:
            found[at] = after.start_s - step.start_s
    return found


def ideal_bubble(analysis: Analysis, microbatches: int) -> float:
    """The share of a step in which ranks have nothing to run, if all partitions take the same and messages no time."""
    pipeline = str(analysis.setting("pipeline", "1f1b"))
    return _ideal(pipeline, partitions(analysis), microbatches, number_of(analysis, "chunks", 2))


@lru_cache(maxsize=256)
def _ideal(pipeline: str, partitions: int, microbatches: int, chunks: int) -> float:
    """Simulated, with B twice as long as F; (p - 1) / (m + p - 1) where the schedule depends on measures."""
    if pipeline not in CHUNKS or partitions * microbatches > MOST_SIMULATED:
        return (partitions - 1) / (microbatches + partitions - 1)
    least, most = CHUNKS[pipeline]
    made = make(
        pipeline, ranks=partitions, microbatches=microbatches, chunks=max(least, min(chunks, most or chunks))
    )
    cost = StageCost(1.0, 2.0, input_s=1.0, weight_s=1.0)
    return simulate(made.ranks, made.rank_of_stage, [cost] * len(made.rank_of_stage)).timeline.bubble


def enough_microbatches(analysis: Analysis, most_bubble: float) -> int | None:
    """The present number, doubled until the ideal bubble is at most so large; None if it has samples for fewer."""
    count, samples = microbatches(analysis), least_samples(analysis)
    while ideal_bubble(analysis, count) > most_bubble:
        count *= 2
        if (samples and (count > samples or samples % count)) or count > MOST_SIMULATED:
            return None
    return count


def least_samples(analysis: Analysis) -> int:
    """Of a rank's mini-batch in a training step, the smallest; 0 if that is not known."""
    return min(
        (step.samples for rank in analysis.ranks for step in analysis.steps(rank) if step.samples), default=0
    )


def host_inside_s(analysis: Analysis) -> dict[int, float]:
    """For each rank the seconds of a usual step, up to the end of the step's function, that no other span covers."""
    return {
        rank: mean(each.get("step", 0.0) for each in own.values()) for rank, own in analysis.inside.items()
    }


def core_time(analysis: Analysis, rank: int) -> float | None:
    """The share of its working time in which a rank had its core, the median of its steps; None if not known.

    It is compared with all that the processor time covers: work, and Python between. Not known on a GPU, which works
    while the thread waits, and with TensorFlow, of which the time of all threads together is measured.
    """
    facts = analysis.facts(rank)
    if not facts.device.startswith("cpu") or "TensorFlow" in facts.versions:
        return None
    found = [cpu_s / busy_s for cpu_s, busy_s in core_times(analysis, rank) if cpu_s > 0 and busy_s > 0]
    return min(1.0, statistics.median(found)) if found else None


def core_times(analysis: Analysis, rank: int) -> list[tuple[float, float]]:
    """For each usual step of a rank its processor time, and how long it did not wait, in seconds."""
    inside = analysis.inside.get(rank, {})
    return [
        (step.cpu_s, sum(seconds for kind, seconds in inside[step.step].items() if kind in BUSY))
        for step in analysis.steps(rank)
        if step.step in inside
    ]


def lost_core(analysis: Analysis, rank: int) -> float:
    """The share of its work in which a rank wanted its core and something else had it; 0 if that is not known.

    Work that waits by itself, for a disk say, does not lose its core: for each second without it the rank must have
    lost it `LOSSES` times.
    """
    had = core_time(analysis, rank)
    return 1.0 - had if had is not None and core_losses(analysis, [rank]) >= LOSSES else 0.0


def core_losses(analysis: Analysis, ranks: Sequence[int]) -> float:
    """The times that ranks lost their cores, for each second in which they worked without one."""
    without_s = sum(
        max(0.0, busy_s - cpu_s) for rank in ranks for cpu_s, busy_s in core_times(analysis, rank)
    )
    lost = sum(
        step.preempted
        for rank in ranks
        for step in analysis.steps(rank)
        if step.step in analysis.inside.get(rank, {})
    )
    return lost / without_s if without_s else 0.0


def own_work(analysis: Analysis) -> tuple[dict[int, float], dict[str, object]]:
    """For each partition its seconds of work in a usual step without those that other processes took, and the evidence.

    Of copies the middle one counts, of two the faster.
    """
    found: dict[int, list[float]] = defaultdict(list)
    lost: dict[int, list[float]] = defaultdict(list)
    for partition, ranks in of_partition(analysis).items():
        for rank in ranks:
            lost[partition].append(lost_core(analysis, rank))
            found[partition].append(analysis.typical[rank].work * (1.0 - lost[partition][-1]))
    work = {partition: statistics.median_low(own) for partition, own in found.items()}
    evidence: dict[str, object] = {
        f"partition {each}": format_seconds(seconds) for each, seconds in work.items()
    }
    for partition, shares in lost.items():
        if (most := max(shares)) >= LEAST_LOST:
            evidence[f"without its core, partition {partition}"] = f"{percent(most)} of its work"
    return work, evidence


def while_training(analysis: Analysis) -> dict[str, list[Sample]]:
    """For each host its measures from the begin of the second step to the end of the last one."""
    starts = [steps[0].start_s for rank in analysis.ranks if (steps := analysis.steps(rank))]
    ends = [step.start_s + step.step_s for rank in analysis.ranks for step in analysis.steps(rank)[-1:]]
    low, high = min(starts, default=float("-inf")), max(ends, default=float("inf"))
    return {
        host: [sample for sample in own if low <= sample.at_s <= high]
        for host, own in sorted(analysis.run.samples.items())
    }


def samples(analysis: Analysis) -> list[Sample]:
    """The measures of all hosts while the job trained."""
    return [sample for own in while_training(analysis).values() for sample in own]


def devices(analysis: Analysis) -> dict[str, list[Device]]:
    """For each GPU, as "host gpu 0", its measures while the job trained, by time."""
    found: dict[str, list[Device]] = defaultdict(list)
    for host, own in while_training(analysis).items():
        for sample in own:
            for number, device in enumerate(sample.devices):
                found[f"{host} gpu {number}"].append(device)
    return dict(found)


def queue(sample: Sample) -> float:
    """Threads that want to run, for each core."""
    return sample.running / len(sample.cores) if sample.cores else 0.0


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    found = list(values)
    return statistics.fmean(found) if found else 0.0


class Host(NamedTuple):
    """A host with its measures while the job trained, by time, and the ranks that it runs."""

    name: str
    samples: list[Sample]
    ranks: tuple[int, ...]


WORST_FIRST = (
    Status.CRITICAL, Status.WARNING, Status.INFO, Status.PASS, Status.NOT_ENOUGH_DATA, Status.NOT_APPLICABLE,
)  # fmt: skip


def hosts(analysis: Analysis) -> list[Host]:
    """Those that were measured and run ranks; a single one runs all, whatever they are called."""
    measured = while_training(analysis)
    found = [
        Host(name, own, tuple(rank for rank in analysis.ranks if analysis.facts(rank).host == name))
        for name, own in measured.items()
    ]
    if len(found) == 1:
        found = [found[0]._replace(ranks=analysis.ranks)]
    return [host for host in found if host.ranks]


def worst(rule: Rule, analysis: Analysis, judge: Callable[[Host], Finding]) -> Finding:
    """The finding of a rule on the host with the worst one; of several that with the largest gain, which is named."""
    every = hosts(analysis)
    found = [(judge(host), host) for host in every]
    if not found:
        return rule.abstain("no host was measured")
    finding, host = min(found, key=lambda each: (WORST_FIRST.index(each[0].status), -(each[0].gain or 0.0)))
    named = len(every) > 1 and finding.text
    return replace(finding, text=f"{finding.text}, on {host.name}") if named else finding
