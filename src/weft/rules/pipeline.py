"""Rules about a model that is split: bubbles, uneven partitions, messages, microbatches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.parts import Parts
from weft.analysis.pipeline.simulated import NEAR
from weft.rules.measures import (
    LEAST_LOST,
    clocks_differ,
    enough_microbatches,
    host_inside_s,
    ideal_bubble,
    least_samples,
    lost_core,
    mean,
    microbatches,
    number_of,
    of_partition,
    own_work,
    partitions,
    percent,
    share,
)
from weft.rules.rule import LEAST_GAIN, Finding, Rule
from weft.units import format_seconds

MOST_LINES = 9
"""A split that needs more lines is reported without them: some of them alone make another one."""


def lighten(analysis: Analysis, partition: int) -> list[str]:
    """Lines that move work away from a partition: those of the best split, where units and their costs are known."""
    found = []
    if analysis.setting("auto_partition") is False:
        found.append('let weft split the model: `"auto_partition": True`')
    elif analysis.setting("optimize") == "memory":
        found.append('balance time instead of memory: `"optimize": "speed"`')
    suggestion = analysis.suggestion
    if suggestion is None:
        return [
            *found,
            f"move modules from partition {partition} to others: `weft.set_partition(module, ...)`",
        ]
    if not suggestion.moves:
        return found or [f"cut the modules of partition {partition} into smaller ones: {suggestion.text}"]
    lines = ", ".join(f"`{line}`" for line in suggestion.lines) if len(suggestion.lines) <= MOST_LINES else ""
    return [*found, f"move {suggestion.text}{': ' if lines else ''}{lines}"]


def gain_of_lightening(analysis: Analysis) -> float | None:
    """The share of a step that `lighten`'s lines save; nothing if that is not known.

    Where no split is better, cutting modules saves no more than equal partitions would. That is the result if it is
    hardly anything.
    """
    suggestion, most = analysis.suggestion, analysis.what_if.gain("equal partitions")
    if suggestion is not None and suggestion.moves:
        return suggestion.gain
    return most if most is not None and most < LEAST_GAIN else None


@dataclass(frozen=True)
class LastPartitionHeavy(Rule):
    """Does the last partition, which has the head and the loss, take longer than every other one?

    By what share its work in a step is longer than that of the longest other partition.
    """

    explains = ("PartitionImbalance", "PipelineBubble", "LowGPUUtilization")

    warn: float = 0.10
    severe: float = 0.25

    def evaluate(self, analysis: Analysis) -> Finding:
        (work, evidence), last = own_work(analysis), partitions(analysis) - 1
        if last < 1:
            return self.not_applicable("the model is not split")
        if last not in work or len(work) < 2 or not any(work.values()):
            return self.abstain("the last partition's work, or that of all others, is not recorded")
        others = max(seconds for partition, seconds in work.items() if partition != last)
        more = work[last] / others - 1 if others else float("inf")
        return self.graded(
            f"the last partition works {percent(more)} longer than every other one" if more > 0 else "",
            (more, self.warn, self.severe),
            evidence=evidence,
            advice=[
                *lighten(analysis, last),
                "compute the loss in pieces, so that the head's output is never whole",
            ],
            gain=gain_of_lightening(analysis),
            ranks=of_partition(analysis)[last],
        )


@dataclass(frozen=True)
class PartitionImbalance(Rule):
    """Does one partition take longer than the others, so that all wait for it?

    The work of the longest partition in a step, as a multiple of the mean. Of replicas the middle one counts, of two
    the faster.
    """

    explains = ("PipelineBubble", "LowGPUUtilization")

    warn: float = 1.10
    severe: float = 1.25

    def evaluate(self, analysis: Analysis) -> Finding:
        work, evidence = own_work(analysis)
        if partitions(analysis) < 2:
            return self.not_applicable("the model is not split")
        if len(work) < 2 or not any(work.values()):
            return self.abstain("only one partition's work is recorded")
        heavy = max(work, key=lambda partition: work[partition])
        ratio = work[heavy] / mean(work.values())
        return self.graded(
            f"partition {heavy} works {ratio:.2f} times as long as the mean of all",
            (ratio, self.warn, self.severe),
            evidence=evidence,
            advice=lighten(analysis, heavy),
            gain=gain_of_lightening(analysis),
            ranks=of_partition(analysis)[heavy],
        )


@dataclass(frozen=True)
class MicrobatchesTooFew(Rule):
    """Is the mini-batch cut into so few microbatches that even a perfect split would stand still?

    The schedule's bubble with equal partitions and free messages: with 1F1B (p - 1) / (m + p - 1), for p partitions and
    m microbatches.
    """

    explains = ("PipelineBubble", "LowGPUUtilization")

    warn: float = 0.20
    severe: float = 0.35

    def evaluate(self, analysis: Analysis) -> Finding:
        count, cut = partitions(analysis), microbatches(analysis)
        if count < 2:
            return self.not_applicable("the model is not split")
        ideal, enough = ideal_bubble(analysis, cut), self._enough(analysis)
        evidence = {"microbatches": cut, "partitions": count, "bubble of the schedule": percent(ideal)}
        if enough:
            evidence[f"with {enough} microbatches"] = percent(ideal_bubble(analysis, enough))
            advice = [f'cut it into more: `"microbatches": {enough}`']
        else:
            advice = [
                "give each step a larger mini-batch and cut it into more microbatches",
                'or take a schedule with fewer bubbles: `"pipeline": "zb_h1"`',
            ]
        if samples := least_samples(analysis):
            evidence["samples of a mini-batch"] = samples
        return self.graded(
            f"with {cut} microbatches for {count} partitions the schedule alone stands still for {percent(ideal)}",
            (ideal, self.warn, self.severe),
            evidence=evidence,
            advice=advice,
            gain=analysis.gain_of_microbatches(enough) if enough else None,
            ranks=analysis.ranks,
        )

    def _enough(self, analysis: Analysis) -> int | None:
        """The number that is best by a simulation with what was measured, else one that makes few bubbles."""
        change = analysis.what_if.change("microbatches")
        if change is not None and change.microbatches > microbatches(analysis):
            return change.microbatches
        return enough_microbatches(analysis, self.warn / 2) or enough_microbatches(analysis, self.warn)


@dataclass(frozen=True)
class MicrobatchesTooMany(Rule):
    """Is the mini-batch cut into so many microbatches that Python for each takes longer than it gains?

    The host's time within a step, as a share of it and of work, where half as many microbatches would save time by
    simulation and leave the bubble below `bubble`. What a pass takes beyond what its units were measured to take is the
    host's.
    """

    explains = ("CPUBottleneck", "LowGPUUtilization", "PipelineBubble")

    warn: float = 0.15
    severe: float = 0.25
    bubble: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        cut = microbatches(analysis)
        if cut < 2:
            return self.not_applicable("the mini-batch is not cut")
        between = mean(host_inside_s(analysis).values())
        work = mean(each.work for each in analysis.typical.values())
        if not work:
            return self.abstain("no work is recorded")
        taken = mean(lost_core(analysis, rank) for rank in analysis.typical)
        own = (1.0 - taken) * (between + work)
        host = max(0.0, between + _inside_passes(analysis) - taken * (between + work))
        lost = host / own
        evidence: dict[str, object] = {
            "microbatches": cut,
            "host for each": format_seconds(host / cut),
            "work for each": format_seconds(work / cut),
        }
        if taken >= LEAST_LOST:
            evidence["without its core"] = f"{percent(taken)} of the work"
        fewer = cut // 2
        if ideal_bubble(analysis, fewer) > self.bubble:
            return self.passed(f"with {fewer} the bubble of the schedule would be too large", **evidence)
        fewer = self._best(analysis, fewer)
        return self.graded(
            f"of each microbatch {percent(lost)} is Python, in passes and between them",
            (lost, self.warn, self.severe),
            evidence=evidence,
            advice=[f'cut it into fewer: `"microbatches": {fewer}`'],
            gain=analysis.gain_of_microbatches(fewer)
            if partitions(analysis) > 1
            else host * (1 - fewer / cut) / analysis.step_s,
            ranks=analysis.ranks,
        )

    def _best(self, analysis: Analysis, fewer: int) -> int:
        """The number that the report's table of changes has, where the schedule's bubble is small with it.

        Else the largest of so many, half of them, a quarter ... that saves `NEAR` of the most, by simulation.
        """
        if partitions(analysis) == 1:
            return fewer
        change = analysis.what_if.change("microbatches")
        if (
            change
            and change.microbatches <= fewer
            and ideal_bubble(analysis, change.microbatches) <= self.bubble
        ):
            return change.microbatches
        gains, number = {fewer: 0.0}, fewer
        while number >= 1 and ideal_bubble(analysis, number) <= self.bubble:
            gains[number] = max(0.0, analysis.gain_of_microbatches(number) or 0.0)
            number //= 2
        most = max(gains.values())
        return max(number for number, gain in gains.items() if gain >= NEAR * most)


def _inside_passes(analysis: Analysis) -> float:
    """Seconds of a rank's step that passes take beyond their units."""
    if analysis.simulated is None:
        return 0.0
    stages = analysis.simulated.stages
    return sum(stages.inside_s) * stages.microbatches * analysis.simulated.chunks


@dataclass(frozen=True)
class PipelineBubble(Rule):
    """Do ranks stand still, and more than the schedule makes them?

    The bubble is the share of work, transfers and bubble together. It may be larger by `warn` than with equal
    partitions and free messages. A bubble that the schedule itself makes counts above `ideal_warn`.
    """

    explains = ("LowGPUUtilization",)

    warn: float = 0.10
    severe: float = 0.20
    ideal_warn: float = 0.20
    ideal_severe: float = 0.35

    def evaluate(self, analysis: Analysis) -> Finding:
        count, cut = partitions(analysis), microbatches(analysis)
        if count < 2:
            return self.not_applicable("the model is not split")
        typical = list(analysis.typical.values())
        if error_s := clocks_differ(analysis):
            return self.abstain(
                f"the ranks' clocks may differ by {format_seconds(error_s)}, more than a tenth of a forward pass"
            )
        bubble, ideal = mean(map(_share, typical)), ideal_bubble(analysis, cut)
        change = analysis.what_if.change("schedule")
        waits = sorted(analysis.waits.items(), key=lambda pair: -pair[1])[:1]
        return self.graded(
            f"ranks have nothing to run for {percent(bubble)} of the pipeline's time; the schedule alone makes "
            f"{percent(ideal)}",
            (bubble - ideal, self.warn, self.severe),
            (ideal, self.ideal_warn, self.ideal_severe),
            evidence={
                "bubble": percent(bubble),
                "bubble of the schedule": percent(ideal),
                "warm-up": format_seconds(mean(each.warmup for each in typical)),
                "steady": format_seconds(mean(each.steady for each in typical)),
                "drain": format_seconds(mean(each.drain for each in typical)),
                "partitions": count,
                "microbatches": cut,
                **{f"rank {a} waits for rank {b}": format_seconds(seconds) for (a, b), seconds in waits},
            },
            advice=[f"take a schedule with fewer bubbles: `{change.line if change else _AUTO}`"],
            gain=analysis.what_if.gain("schedule"),
            ranks=analysis.ranks,
        )


_AUTO = '"pipeline": "auto"'


def _share(parts: Parts) -> float:
    inside = parts.work + parts.bubble + parts.transfer
    return parts.bubble / inside if inside > 0 else 0.0


@dataclass(frozen=True)
class TransferExposed(Rule):
    """Do ranks wait for tensors that were sent and have not come yet?

    The share of a step, the mean over ranks. Transfers beside work do not count.
    """

    explains = ("PipelineBubble", "LowGPUUtilization")

    warn: float = 0.05
    severe: float = 0.15

    def evaluate(self, analysis: Analysis) -> Finding:
        if partitions(analysis) < 2:
            return self.not_applicable("the model is not split")
        if not analysis.messages:
            return self.abstain("no message was recorded with both its ends")
        if error_s := clocks_differ(analysis):
            return self.abstain(
                f"the ranks' clocks may differ by {format_seconds(error_s)}, more than a tenth of a forward pass"
            )
        usual = [message for message in analysis.messages if message.step in analysis.usual_steps]
        exposed = share(analysis, lambda parts: parts.transfer)
        took = mean(message.arrived_s - message.ready_s for message in usual)
        hosts = {analysis.facts(rank).host for rank in analysis.ranks}
        advice = [
            "send activations in half precision: `torch.autocast(..., dtype=torch.bfloat16)` in the step"
        ]
        if len(hosts) > 1:
            advice.insert(0, 'put the ranks of one pipeline on one host: `"placement_strategy": "cluster"`')
        if microbatches(analysis) < 2 * partitions(analysis):
            advice.insert(0, f'send while others work: `"microbatches": {2 * microbatches(analysis)}`')
        return self.graded(
            f"ranks wait for tensors on their way for {percent(exposed)} of a step",
            (exposed, self.warn, self.severe),
            evidence={
                "exposed": percent(exposed),
                "a message takes": format_seconds(took),
                "messages a step": round(len(usual) / max(1, len(analysis.usual_steps))),
                "hosts": len(hosts),
            },
            advice=advice,
            gain=analysis.what_if.gain("no transfers"),
            ranks=analysis.ranks,
        )


@dataclass(frozen=True)
class TensorParallelExposed(Rule):
    """Do ranks that hold parts of the same weights wait for each other's results?

    The share of a step in which they all-reduce or all-gather tensors, the mean over ranks.
    """

    explains = ("LowGPUUtilization",)

    warn: float = 0.2
    severe: float = 0.35

    def evaluate(self, analysis: Analysis) -> Finding:
        exposed = share(analysis, lambda parts: parts.tensor)
        degree = number_of(analysis, "tensor_parallel_degree")
        if degree < 2 and not exposed:
            return self.not_applicable("no weights are cut over ranks")
        hosts = _hosts_of_shards(analysis)
        advice = []
        if hosts > 1:
            advice.append(
                'keep ranks with parts of the same weights on one host: `"placement_strategy": "cluster"`, a '
                '`"tensor_parallel_degree"` of at most the ranks of a host, and `"partitions"` between hosts'
            )
        if degree > 2:
            advice.append(f'cut over fewer ranks: `"tensor_parallel_degree": {degree // 2}`')
        advice += [
            'where the model fits a device, train copies of it instead: `"tensor_parallel_degree": 1`',
            "send half as much: `torch.autocast(..., dtype=torch.bfloat16)` in the step",
        ]
        return self.graded(
            f"ranks with parts of the same weights exchange results for {percent(exposed)} of a step",
            (exposed, self.warn, self.severe),
            evidence={"exposed": percent(exposed), "ranks of a team": degree, "hosts of a team": hosts},
            advice=advice,
            gain=exposed,
            ranks=analysis.ranks,
        )


def _hosts_of_shards(analysis: Analysis) -> int:
    """The number of hosts over which the shards of one partition of one replica lie."""
    hosts: dict[tuple[int, int], set[str]] = defaultdict(set)
    for rank in analysis.ranks:
        facts = analysis.facts(rank)
        hosts[facts.rdp_rank, facts.pp_rank].add(facts.host)
    return max(map(len, hosts.values()), default=0)
