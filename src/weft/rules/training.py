"""Rules about the run itself: its recording, its start, its steps, and what stops them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import fmean, median

from weft.analysis.analysis import Analysis
from weft.analysis.parts import Parts
from weft.analysis.series import outliers
from weft.rules.measures import percent, share, share_of_all
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds
from weft.untrusted import listed


@dataclass(frozen=True)
class JobFailed(Rule):
    """Did the job fail?

    The launcher's sentence, with the rank that failed first.
    """

    least_steps = 0
    loses_run = True
    explains = ("RecordingIncomplete",)

    def evaluate(self, analysis: Analysis) -> Finding:
        failed = analysis.run.failed
        if failed is None:
            return self.passed("no rank failed")
        done = max((len(steps) for steps in analysis.run.steps.values()), default=0)
        return self.critical(
            f"the job failed: {failed.headline}",
            evidence={"step": failed.step, "recorded steps": done},
            advice=["mend that first; all else here is about the steps before"],
            ranks=[failed.rank],
            steps=[failed.step] if failed.step else [],
        )


@dataclass(frozen=True)
class RecordingIncomplete(Rule):
    """Does the recording lack a rank, or is a file of it damaged?

    A rank that is missing at the end of a job is critical.
    """

    least_steps = 0
    loses_run = True

    def evaluate(self, analysis: Analysis) -> Finding:
        count = max((facts.ranks for facts in analysis.run.facts.values()), default=0)
        missing = sorted(
            set(range(count)) - set(analysis.timeline.ranks) if len(analysis.timeline.ranks) else ()
        )
        faults = list(analysis.run.warnings)
        if missing:
            faults.insert(0, f"nothing is recorded of rank {listed(missing)}, of {count} ranks")
        if not faults:
            return self.passed("all ranks are there, and their files are whole")
        say = self.critical if missing and analysis.run.complete else self.warning
        return say(
            faults[0],
            evidence={"missing ranks": len(missing), "ranks": count}
            | {f"fault {number}": text for number, text in enumerate(faults[:20], 1)},
            advice=[
                "copy the folders of all hosts together before the report: `weft report`",
                "look in that rank's output for the reason why it ended",
            ],
            ranks=missing,
        )


@dataclass(frozen=True)
class MaxInitializationTime(Rule):
    """Does it take long until the first step begins?

    From the begin of the process to that of the first step, above `threshold` minutes. A large share of the run
    (`share`) is worth knowing.
    """

    least_steps = 0

    threshold: float = 20.0
    share: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        found = {}
        for rank in analysis.ranks:
            facts, steps = analysis.facts(rank), analysis.run.steps.get(rank, ())
            if steps and facts.joined_s > facts.start_s:
                found[rank] = steps[0].start_s - facts.start_s
        if not found:
            return self.abstain("it is not known when the processes began")
        rank = max(found, key=lambda each: found[each])
        facts, last = analysis.facts(rank), analysis.run.steps[rank][-1]
        whole = last.start_s + last.step_s - facts.start_s
        share = found[rank] / whole if whole > 0 else 0.0
        text = f"the first step of rank {rank} began after {format_seconds(found[rank])}, {percent(share)} of the run"
        evidence = {
            "until weft.init had ended": format_seconds(facts.joined_s - facts.start_s),
            "until the first step": format_seconds(found[rank]),
            "share of the run": percent(share),
        }
        advice = ["keep what is loaded or built at the start in a cache, and read data as it is needed"]
        if found[rank] > 60 * self.threshold:
            return self.warning(text, evidence=evidence, advice=advice, ranks=[rank])
        if share > self.share:
            return self.info(text, evidence=evidence, ranks=[rank])
        return self.passed(text, **evidence)


@dataclass(frozen=True)
class OverallFrameworkMetrics(Rule):
    """Into what does the time of a step go?

    The share of each part of a usual step, the mean over ranks; parts below `least` are left out. It never warns.
    """

    least: float = 0.02

    def evaluate(self, analysis: Analysis) -> Finding:
        shares = {name: share(analysis, attrgetter(name)) for name in Parts._fields}
        largest = max(shares, key=lambda name: shares[name])
        return self.info(
            f"of a step {percent(shares[largest])} is {largest.replace('_', ' ')}",
            evidence={
                name.replace("_", " "): percent(value)
                for name, value in shares.items()
                if value >= self.least
            },
        )


@dataclass(frozen=True)
class EvaluationShare(Rule):
    """Does evaluation take much of the run?

    The share of steps without a backward pass, with what lies between them, of the time after the first step, on the
    rank with most of it. The advice says how seldom it would take `good` of that time.
    """

    least_steps = 0

    warn: float = 0.20
    severe: float = 0.75
    good: float = 0.05
    least_trained: int = 5

    def evaluate(self, analysis: Analysis) -> Finding:
        rank = max(analysis.run_times, key=lambda each: analysis.run_times[each].evaluate, default=None)
        if rank is None or not analysis.run_times[rank].evaluate:
            return self.not_applicable("no step evaluated")
        spent = analysis.run_times[rank]
        runs = [(evaluates, len(list(own))) for evaluates, own in groupby(
            step.evaluates for step in analysis.run.steps[rank]
        )]  # fmt: skip
        rounds = [count for evaluates, count in runs if evaluates]
        trained = sum(count for evaluates, count in runs if not evaluates)
        if trained < self.least_trained:
            return self.abstain(f"{trained} steps trained, it needs {self.least_trained}")
        whole_s = spent.total - spent.start - spent.load - spent.first
        share = spent.evaluate / whole_s
        every = max(1, round(trained / len(rounds)))
        rest_s = (whole_s - spent.evaluate) / trained
        seldom = math.ceil(spent.evaluate / len(rounds) * (1 / self.good - 1) / rest_s) if rest_s > 0 else 0
        return self.graded(
            f"evaluation takes {percent(share)} of the time after the first step: {sum(rounds)} steps without a "
            f"backward pass, after each {every} that train",
            (share, self.warn, self.severe),
            evidence={
                "share": percent(share),
                "rounds": len(rounds),
                "steps a round": round(sum(rounds) / len(rounds)),
            },
            advice=[
                f"evaluate after each {seldom} training steps instead of {every}: it takes {percent(self.good)} then"
                if seldom > every
                else "evaluate on fewer batches",
                "larger batches for evaluation: without a backward pass they need less memory",
            ],
            gain=share - self.good,
            ranks=[rank],
        )


@dataclass(frozen=True)
class CheckpointStall(Rule):
    """Does saving checkpoints stop the training?

    Its share of the run without its first step, on the rank with most of it.
    """

    explains = ("StepOutlier", "PipelineBubble", "CPUBottleneck", "AllReduceExposed", "IOBottleneck")

    warn: float = 0.05
    severe: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        share, steps = share_of_all(analysis, lambda step: step.checkpoint_s)
        if not share:
            return self.not_applicable("no checkpoint was saved")
        return self.graded(
            f"saving checkpoints takes {percent(share)} of the time",
            (share, self.warn, self.severe),
            evidence={"share": percent(share), "saves": len(steps)},
            advice=[
                "write beside the training: `weft.save_checkpoint(..., asynchronous=True)`",
                "save less often",
            ],
            gain=share,
            ranks=analysis.ranks,
            steps=steps[:5],
        )


@dataclass(frozen=True)
class CollectorPauses(Rule):
    """Does Python's garbage collector stop the training?

    Its share of the run without its first step, on the rank with most of it. A pause is one that takes `least` of a
    step; a single one in a run is no fault.
    """

    explains = ("StepOutlier", "PipelineBubble", "CPUBottleneck", "AllReduceExposed")

    warn: float = 0.01
    severe: float = 0.03
    least: float = 0.05

    def evaluate(self, analysis: Analysis) -> Finding:
        share, steps = share_of_all(analysis, lambda step: step.collector_s, self.least)
        if len(steps) < 2:
            return self.passed(f"{len(steps)} pauses of the garbage collector", share=percent(share))
        return self.graded(
            f"the garbage collector takes {percent(share)} of the time",
            (share, self.warn, self.severe),
            evidence={"share": percent(share), "steps with a pause": len(steps)},
            advice=[
                "collect on all ranks at the same time: `gc.disable()`, and `gc.collect()` every 1000 steps",
                "leave out what stays anyhow: `gc.freeze()` after the model is made",
            ],
            gain=share,
            ranks=analysis.ranks,
            steps=steps[:5],
        )


ASLEEP = (
    "the line waits, for a disk, the network or a clock: do it every 100 steps, or in a thread",
    "a log that is flushed each step, a metric that is sent each step: collect some first",
)
COMPUTES = (
    "the line computes: move it into the dataset, with `DataLoader(num_workers=2)`, or do it every 100 steps",
    "a number that is read each step (`.item()`, `print`) makes Python wait: read it every 100 steps",
)


@dataclass(frozen=True)
class ScriptBetweenSteps(Rule):
    """Does a line of the script take much time between two steps?

    The time of all lines that were seen there, of the time from the first step's end, on the rank with most of it. A
    line sleeps where its thread neither computes nor waits for a core.
    """

    explains = ("CPUBottleneck", "PipelineBubble", "AllReduceExposed", "LowGPUUtilization", "LoadBalancing")

    warn: float = 0.10
    severe: float = 0.30

    def evaluate(self, analysis: Analysis) -> Finding:
        taken = {rank: sum(line.seconds for line in lines) for rank, lines in analysis.run.script.items()}
        rank = max(taken, key=lambda each: taken[each], default=None)
        if rank is None or not taken[rank] or rank not in analysis.run_times:
            return self.not_applicable("no line of the script was seen between steps")
        spent = analysis.run_times[rank]
        whole_s = spent.total - spent.start - spent.load - spent.first
        share = min(1.0, taken[rank] / whole_s) if whole_s > 0 else 0.0
        lines = sorted(analysis.run.script[rank], key=lambda line: -line.seconds)
        steps = max(1, len(analysis.run.steps[rank]) - 1)
        first = lines[0]
        asleep = first.asleep_s > first.computing_s
        said = {
            line.place: f"{format_seconds(line.seconds / steps)} of each step, asleep for "
            f"{percent(line.asleep_s / line.seconds)}"
            for line in lines[:5]
            if line.seconds
        }
        return self.graded(
            f"the script takes {percent(share)} of the time between steps, most of it at {first.place}: "
            f"{format_seconds(first.seconds / steps)} of each step, {'asleep' if asleep else 'computing'}",
            (share, self.warn, self.severe),
            evidence=said,
            advice=ASLEEP if asleep else COMPUTES,
            gain=min(1.0, first.seconds / whole_s) if whole_s > 0 else None,
            ranks=[rank],
        )


FIRST = 2
"""So many steps at the begin trace and split, or wait for other ranks that do."""


@dataclass(frozen=True)
class StepOutlier(Rule):
    """Do some steps take much longer than the others?

    A step's time goes to the begin of the next one. An outlier is above the median by `stddev` robust standard
    deviations (1.4826 times the median distance), and by `least` of the median. It takes more than `n_outliers` of
    them, and `warn` of the time lost in them. The first two steps do not count.
    """

    explains = ("PipelineBubble",)

    stddev: float = 4.0
    n_outliers: int = 1
    least: float = 0.5
    warn: float = 0.01
    severe: float = 0.15
    patience: int = 20

    def evaluate(self, analysis: Analysis) -> Finding:
        taken = _step_times(analysis)
        if len(taken) < self.patience:
            return self.abstain(f"{len(taken)} steps, it needs {self.patience}")
        middle, numbers = median(taken.values()), list(taken)
        far = {
            numbers[place]: taken[numbers[place]]
            for place in outliers(list(taken.values()), 1.4826 * self.stddev, self.least)
        }
        lost = sum(seconds - middle for seconds in far.values()) / sum(taken.values())
        evidence = {
            "median": format_seconds(middle), "outliers": len(far), "of steps": len(taken),
            "longest": format_seconds(max(taken.values())),
        }  # fmt: skip
        if len(far) <= self.n_outliers:
            return self.passed("the steps take alike", **evidence)
        worst = sorted(far, key=lambda step: -far[step])[:5]
        if what := _what_grew(analysis, worst):
            evidence["what takes longer in them"] = what
        return self.graded(
            f"{len(far)} of {len(taken)} steps take {fmean(far.values()) / middle:.1f} times as long as the median: "
            f"steps {listed(sorted(far), most=4)}",
            (lost, self.warn, self.severe),
            evidence=evidence | {"lost in them": percent(lost)},
            advice=[
                "look at those steps on the timeline"
                + (
                    f": {what} takes longer there"
                    if what
                    else ", and at what the script does every so many steps"
                )
            ],
            gain=lost,
            ranks=analysis.ranks,
            steps=worst,
        )


def _step_times(analysis: Analysis) -> dict[int, float]:
    """Seconds from each training step to the next, of the rank on which it is longest; none before an evaluation."""
    found: dict[int, float] = {}
    for rank in analysis.ranks:
        for this, following in pairwise(analysis.run.steps.get(rank, ())[FIRST:]):
            if not this.evaluates and not following.evaluates and following.step == this.step + 1:
                found[this.step] = max(found.get(this.step, 0.0), following.start_s - this.start_s)
    return found


IN_WORDS = {
    **dict.fromkeys(("warmup", "steady", "drain"), "waiting for other ranks"), "transfer": "waiting for a message",
    "reduce": "the all-reduce of gradients", "tensor": "tensor parallelism's all-reduce", "host": "the script",
}  # fmt: skip
"""Parts of a step whose names alone say too little."""


def _what_grew(analysis: Analysis, steps: list[int]) -> str:
    """The part that is longer in these steps than in usual ones by most; empty without their spans."""
    grown: dict[str, float] = {}
    for rank, own in analysis.parts.items():
        for period, parts in own.items():
            if period.step in steps:
                for name in Parts._fields:
                    more = getattr(parts, name) - getattr(analysis.typical[rank], name)
                    grown[name] = max(grown.get(name, 0.0), more)
    most = max(grown, key=lambda name: grown[name], default="")
    return IN_WORDS.get(most, most.replace("_", ", ")) if grown and grown[most] > 0 else ""
