"""Runs as they would be recorded, made from the simulation: every time in them is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.analysis.run import Facts, Run, Sample, Step, Unit
from weft.plan.measured.planned import Planned
from weft.schedule import make
from weft.simulate import Links, Simulation, StageCost, executed_order, simulate
from weft.timeline import WORK, Span, Timeline
from weft.topology.cluster import Link


@dataclass(frozen=True)
class Recorded:
    """What a made run is like.

    Attributes:
        partitions: One stage each.
        replicas: Ranks are `replica * partitions + partition`.
        forward_s: Of a microbatch, for each stage; one number for all.
        backward_s: The same for B; I and W take half of it each.
        slow: For a rank how many times slower it works than its stage should.
        late: For a step and a rank, how many times slower the rank works in that step.
        data_s: Waiting for data before each step, on every rank of the first partition.
        transfer_s: What a message takes.
        tensor: The share of each pass in which ranks with parts of the same weights exchange results.
        first_s: What the first step takes besides, for tracing.
        schedule: `1f1b` is 1F1B.
        ready_first: Ranks run what is ready, as weft's do, instead of waiting for what comes first in the schedule.
    """

    partitions: int = 4
    microbatches: int = 8
    replicas: int = 1
    steps: int = 8
    forward_s: float | Sequence[float] = 1.0
    backward_s: float | Sequence[float] = 2.0
    transfer_s: float = 0.0
    tensor: float = 0.0
    data_s: float = 0.0
    optimizer_s: float = 0.0
    reduce_s: float = 0.0
    first_s: float = 0.0
    host_s: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[tuple[int, int], float] = field(default_factory=dict)
    schedule: str = "1f1b"
    ready_first: bool = False
    step_values: Callable[[int, int], dict[str, object]] = lambda rank, step: {}
    """Fields of `Step` for a rank and a step, instead of those made here."""
    settings: Mapping[str, object] = field(default_factory=dict)
    units: tuple[Unit, ...] = ()
    pauses: Mapping[int, tuple[str, float]] = field(default_factory=dict)
    """After a step, on every rank: a kind of span, and how long it takes."""
    planned: Planned | None = None
    sample: Sample | None = None
    """What was measured on the host, twice a second, from the begin to the end."""

    def run(self, name: str = "made") -> Run:
        """The run."""
        spans: list[Span] = []
        steps: dict[int, list[Step]] = {rank: [] for rank in range(self.partitions * self.replicas)}
        now = 0.0
        for step in range(1, self.steps + 1):
            ends = []
            for replica in range(self.replicas):
                made = self._step(replica, step)
                ends.append(made.step_s)
            length = max(ends) + (self.first_s if step == 1 else 0.0)
            for replica in range(self.replicas):
                self._add(spans, steps, replica, step, now, length)
            now += length + self.reduce_s + self.optimizer_s + self.host_s + self.data_s + self._pause_s(step)
        facts = {rank: self._facts(rank) for rank in steps}
        samples: dict[str, tuple[Sample, ...]] = {}
        if self.sample is not None:
            samples["node"] = tuple(replace(self.sample, at_s=number / 2) for number in range(int(2 * now)))
        return Run(name, Timeline(spans), facts, {rank: tuple(own) for rank, own in steps.items()}, samples)

    def _pause_s(self, step: int) -> float:
        return self.pauses[step][1] if step in self.pauses else 0.0

    def _facts(self, rank: int) -> Facts:
        settings = {
            "partitions": self.partitions, "microbatches": self.microbatches, "pipeline": self.schedule,
            **self.settings,
        }  # fmt: skip
        return Facts(
            rank, self.partitions * self.replicas, "node", 100 + rank, rank % self.partitions, rank // self.partitions,
            cores=2, limit_bytes=1 << 30, settings=settings, units=self.units,
            planned=self.planned,
        )  # fmt: skip

    def _costs(self, replica: int, step: int) -> list[StageCost]:
        forward, backward = (
            [each] * self.partitions if isinstance(each, (int, float)) else list(each)
            for each in (self.forward_s, self.backward_s)
        )
        found = []
        for stage in range(self.partitions):
            rank = replica * self.partitions + stage
            times = self.slow.get(rank, 1.0) * self.late.get((step, rank), 1.0)
            whole = times * backward[stage]
            found.append(StageCost(times * forward[stage], whole, whole / 2, whole / 2))
        return found

    def _step(self, replica: int, step: int) -> Simulation:
        made = make(self.schedule, ranks=self.partitions, microbatches=self.microbatches)
        links = Links.uniform(Link(name="wire", latency_s=self.transfer_s))
        costs = self._costs(replica, step)
        order = (
            executed_order(made.ranks, made.rank_of_stage, costs, links) if self.ready_first else made.ranks
        )
        return simulate(order, made.rank_of_stage, costs, links)

    def _add(
        self, spans: list[Span], steps: dict[int, list[Step]], replica: int, step: int, now: float, length: float
    ) -> None:  # fmt: skip
        made = self._step(replica, step)
        begin = now + (self.first_s if step == 1 else 0.0)
        if begin > now:
            spans += [
                Span(replica * self.partitions + stage, "prepare", -1, now, begin, step=step)
                for stage in range(self.partitions)
            ]
        of_stage = {
            (span.stage, span.kind, span.microbatch): span
            for span in made.timeline.spans
            if span.kind in WORK
        }
        for stage in range(self.partitions):
            rank = replica * self.partitions + stage
            own = [span for span in made.timeline.of_rank(stage) if span.kind in WORK]
            reached, work_s, wait_s = begin, 0.0, 0.0
            for span in own:
                source = stage - 1 if span.kind == "F" else stage + 1
                start = begin + span.start_s
                what = "value" if span.kind == "F" else "gradient"
                if 0 <= source < self.partitions:
                    ready = begin + of_stage[source, span.kind, span.microbatch].end_s
                    peer = replica * self.partitions + source
                    spans.append(
                        Span(peer, "send", span.microbatch, ready, ready + self.transfer_s, -1,
                             f"{what} to rank {rank}", step, rank)
                    )  # fmt: skip
                    spans.append(
                        Span(rank, "recv", span.microbatch, ready, ready + self.transfer_s, -1,
                             f"{what} from rank {peer}", step, peer)
                    )  # fmt: skip
                    if start > reached:
                        spans.append(
                            Span(
                                rank,
                                "wait",
                                span.microbatch,
                                reached,
                                start,
                                -1,
                                f"for rank {peer}",
                                step,
                                peer,
                            )
                        )
                        wait_s += start - reached
                end = begin + span.end_s
                spans.append(Span(rank, span.kind, span.microbatch, start, end, stage, "", step))
                if self.tensor:
                    spans.append(Span(rank, "tensor", -1, end - self.tensor * (end - start), end, step=step))
                work_s += end - start
                reached = end
            end = now + length
            if end > reached:
                peer = replica * self.partitions
                spans.append(Span(rank, "wait", -1, reached, end, -1, f"for rank {peer}", step, peer))
                wait_s += end - reached
            after = end
            if self.reduce_s:
                spans.append(Span(rank, "reduce", -1, end, end + self.reduce_s, step=step))
                after += self.reduce_s
            spans.append(Span(rank, "step", -1, now, after, step=step))
            if self.optimizer_s:
                spans.append(Span(rank, "optimizer", -1, after, after + self.optimizer_s, step=step))
                after += self.optimizer_s
            after += self.host_s
            if step in self.pauses:
                kind, seconds = self.pauses[step]
                spans.append(Span(rank, kind, -1, after, after + seconds, step=step))
                after += seconds
            if self.data_s:
                kind = "data" if stage == 0 else "wait"
                spans.append(Span(rank, kind, -1, after, after + self.data_s, step=step))
            values: dict[str, object] = {
                "step_s": end + self.reduce_s - now, "data_s": self.data_s if stage == 0 else 0.0,
                "optimizer_s": self.optimizer_s, "work_s": work_s, "wait_s": wait_s, "cpu_s": work_s,
                "samples": 32, "memory_bytes": 100 << 20,
                **({f"{self.pauses[step][0]}_s": self.pauses[step][1]} if step in self.pauses else {}),
            }  # fmt: skip
            steps[rank].append(Step(step, now, **{**values, **self.step_values(rank, step)}))  # type: ignore[arg-type]
