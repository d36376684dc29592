"""Into what the whole time of each rank went, from the begin of its process to its last step or its failure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from weft.analysis.run import Run, Step


class RunTime(NamedTuple):
    """Seconds of one rank; they add up to its run.

    Attributes:
        start: From the begin of the process to the end of `weft.init`: imports, meeting the other ranks.
        load: From there to the first step: the model, the data.
        first: The first step, which traces, splits and proves the model.
        train: The other training steps and the optimizer, without waiting.
        idle: Waiting for other ranks in them.
        evaluate: Steps without a backward pass, with what lies between two of them.
        data: Waiting for batches to train with.
        checkpoint: Saving.
        host: The rest: the script between steps.
        lost: In a job that failed, or that was ended from outside: what came after the last step that ended.
    """

    start: float = 0.0
    load: float = 0.0
    first: float = 0.0
    train: float = 0.0
    idle: float = 0.0
    evaluate: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0
    host: float = 0.0
    lost: float = 0.0

    @property
    def total(self) -> float:
        """The whole run."""
        return sum(self)

    def share(self, part: str) -> float:
        """The share of the run of a part, from 0 to 1."""
        return float(getattr(self, part)) / self.total if self.total > 0 else 0.0


def run_times(run: Run) -> Mapping[int, RunTime]:
    """The time of each rank of which steps are known."""
    return {rank: _run_time(run, rank, steps) for rank, steps in sorted(run.steps.items()) if steps}


def _run_time(run: Run, rank: int, steps: tuple[Step, ...]) -> RunTime:
    facts, first, last = run.facts.get(rank), steps[0], steps[-1]
    began_s = joined_s = first.start_s
    if facts is not None and facts.start_s <= facts.joined_s <= first.start_s:
        began_s, joined_s = facts.start_s, facts.joined_s
    train = [step for step in steps[1:] if not step.evaluates]
    evaluate = [step for step in steps[1:] if step.evaluates]
    found = RunTime(
        start=joined_s - began_s,
        load=first.start_s - joined_s,
        first=first.step_s,
        train=sum(max(0.0, step.step_s - step.wait_s) + step.optimizer_s for step in train)
        + first.optimizer_s,
        idle=sum(min(step.wait_s, step.step_s) for step in train),
        evaluate=sum(step.step_s for step in evaluate) + _between(steps),
        data=sum(step.data_s for step in train),
        checkpoint=sum(step.checkpoint_s for step in steps),
    )
    end_s = last.start_s + last.step_s + last.optimizer_s + last.checkpoint_s
    return found._replace(
        host=max(0.0, end_s - began_s - found.total), lost=max(0.0, _failure_s(run, rank) - end_s)
    )


def _failure_s(run: Run, rank: int) -> float:
    """The time of the last record of a rank and its host, in a run that did not come to its end; else 0."""
    if run.complete and run.failed is None:
        return 0.0
    host = run.facts[rank].host if rank in run.facts else ""
    spans = (span.end_s for span in run.timeline.spans if span.rank == rank)
    return max([*spans, *(sample.at_s for sample in run.samples.get(host, ()))], default=0.0)


def _between(steps: tuple[Step, ...]) -> float:
    """The seconds between two steps that evaluate, without saves."""
    gaps = [
        after.start_s - step.start_s - step.step_s - step.checkpoint_s
        for step, after in pairwise(steps)
        if step.evaluates and after.evaluates
    ]
    return sum(max(0.0, gap) for gap in gaps)
