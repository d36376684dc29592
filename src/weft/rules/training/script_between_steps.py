"""Lines of the script that take time between steps."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import percent
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds

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

    The measure is the time of all lines that were seen there, of the time from the first step's end, on the rank with
    most of it. A line sleeps where its thread neither computes nor waits for a core.
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
