"""From a recorded run to a machine's figures with which the plan of that very run comes true.

A plan's step is a sum of terms (see `weft.plan.parallelism.step`), and a recording has what became of each. So

    work                  the share of the peak, in proportion: products and attention take what is left of the work
                          when what lies between them is taken off
    optimizer             the share of the memory's bandwidth: all that an optimizer does is read and write
    crossings             the rate of the link, from the size that the job's formula gives a message; what is waited for
                          longer than messages take is what a crossing costs besides
    replicas, exposed     the part of their exchange that runs beside computation; where it is longer than the link
                          says, the link
    memory                what a rank may take

The bubble follows from the work. What no figure stands for stays as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from weft.analysis.messages import Message
from weft.analysis.plan.comparison import Seen, window_s
from weft.errors import UsageError
from weft.machines.accelerator import Accelerator
from weft.machines.host import Conduct, Host, Machines
from weft.plan.parallelism.job import SCHEDULES, Division, Job
from weft.plan.parallelism.step import Step, StepTimes, crossing_rounds, exchanged_s, rank_parameters, step_of
from weft.topology.cluster import Link

ROUNDS = 8
"""Where a head costs as many layers as its rank has less, the busiest rank may be another one with other shares."""
LEFT = 0.2
"""An optimizer's rate is believed if products have at least this part of the work with it. Of few parameters it takes
its time for calling, not for moving."""
LEAST_S = 1e-9
NUDGE = 1.001
"""So many times as fast a device computes when its work is looked at: little, so that no layer changes its rank."""


class Recording(Seen, Protocol):
    """The part of an analysis that is read here."""

    @property
    def messages(self) -> list[Message]:
        """Those with both ends."""


@dataclass(frozen=True)
class Observed:
    """A run's layout, and the terms of a usual step on its busiest rank.

    Attributes:
        division: How the job was divided.
        hosts: How many there were.
        parts: Seconds of each term, by its name.
        message_s: What a message of a microbatch took, from where it was ready; 0 if there were none.
        limit_bytes: The least that a rank might take; 0 if that is not known.
        steps: How many usual steps that is the mean of.
    """

    division: Division
    hosts: int
    parts: Mapping[str, float]
    message_s: float = 0.0
    limit_bytes: int = 0
    steps: int = 1

    @property
    def step_s(self) -> float:
        """The sum of the terms: the step without waiting for data and without what the script does."""
        return sum(self.parts.values())


def observe(analysis: Recording, batch: int) -> Observed:
    """The terms of a plan's step, read from a recording; `batch`: sequences of a step, all replicas together.

    Raises:
        UsageError: It has no usual step, or was not divided so.
    """
    if not analysis.typical:
        raise UsageError(f"{analysis.run.name} has no usual step: record some more steps")
    settings = {name: analysis.setting(name) for name in ("partitions", "microbatches", "chunks")}
    partitions, microbatches, chunks = (
        value if isinstance(value, int) and value > 0 else 1 for value in settings.values()
    )
    ranks = len(analysis.run.ranks)
    data = ranks // partitions
    if ranks % partitions or batch % (data * microbatches):
        raise UsageError(
            f"{analysis.run.name}: {ranks} ranks with {partitions} partitions and {microbatches} microbatches cannot "
            f"share {batch} sequences equally: give --global-batch as the run had it"
        )
    asked = str(analysis.setting("pipeline", "1f1b"))
    schedule = asked if asked in SCHEDULES else "1f1b"  # the others are as quick, or nearly
    sharded = "optimizer" if analysis.setting("shard_optimizer_state") is True else "none"
    degree = analysis.setting("sharded_data_parallel_degree", 1)
    division = Division(
        data=data, pipeline=partitions, chunks=chunks if schedule == "interleaved_1f1b" else 1, schedule=schedule,
        microbatch=batch // (data * microbatches),
        sharded="parameters" if isinstance(degree, int) and degree > 1 else sharded,
    )  # fmt: skip
    busiest = max(analysis.typical.values(), key=lambda each: each.work)
    taken = window_s(analysis.timeline, analysis.usual_steps)
    parts = {
        "work": busiest.work, "bubble": max(0.0, taken - busiest.work - busiest.transfer) if partitions > 1 else 0.0,
        "crossings": busiest.transfer, "replicas, exposed": busiest.reduce, "optimizer": busiest.optimizer,
    }  # fmt: skip
    known = [analysis.facts(rank) for rank in analysis.run.ranks]
    limits = [facts.limit_bytes for facts in known if facts.limit_bytes]
    return Observed(
        division, len({facts.host for facts in known}), parts, _message_s(analysis), min(limits, default=0),
        len(analysis.usual_steps),
    )  # fmt: skip


def _message_s(analysis: Recording) -> float:
    """The median of what the longest message of each microbatch takes, there and back."""
    longest: dict[tuple[int, int, int, int], float] = {}
    for one in analysis.messages:
        if one.step in analysis.usual_steps and one.microbatch >= 0:
            key = one.step, one.sender, one.receiver, one.microbatch
            longest[key] = max(longest.get(key, 0.0), one.arrived_s - one.ready_s)
    return statistics.median(longest.values()) if longest else 0.0


def predicted(job: Job, host: Host, observed: Observed) -> Step:
    """The step of that run by the figures of a machine."""
    return step_of(job, observed.division, _machines(host, observed))


def terms(step: Step) -> dict[str, float]:
    """The terms of a plan's step that a recording has, by the names of `Observed.parts`."""
    return {
        "work": step.work, "bubble": step.bubble, "crossings": step.crossings, "replicas, exposed": step.exposed,
        "optimizer": step.optimizer,
    }  # fmt: skip


def _machines(host: Host, observed: Observed) -> Machines:
    each = max(1, observed.division.ranks // observed.hosts)
    return Machines(replace(host, accelerators=each), observed.hosts)


def calibrate(host: Host, seen: Sequence[tuple[Job, Observed]]) -> Host:
    """The host with the figures that runs had: what computes from all of them, others from the first that has them.

    Runs with microbatches of two sizes say how the share of the peak follows from the size of a product.
    """
    job, observed = seen[0]
    if observed.limit_bytes:
        host = replace(host, accelerator=replace(host.accelerator, memory_bytes=observed.limit_bytes))
    several = len({(job.sizes, one.division.microbatch) for job, one in seen}) > 1
    for _ in range(2):  # which layers are on which stage follows from what they cost, too
        host = _with_optimizer(job, host, observed)
        host = _with_sizes(host, seen) if several else _with_work(job, host, observed)
    piped = next((pair for pair in seen if pair[1].division.pipeline > 1), None)
    copied = next((pair for pair in seen if pair[1].division.data > 1), None)
    host = host if piped is None else _with_messages(piped[0], host, piped[1])
    host = host if copied is None else _with_replicas(copied[0], host, copied[1])
    return host if piped is None else _with_crossings(piped[0], host, piped[1])


def _with_optimizer(job: Job, host: Host, observed: Observed) -> Host:
    """The share of the memory's bandwidth; as it was if too little work is left with it."""
    measured = observed.parts["optimizer"]
    if measured < LEAST_S:
        return host
    changed = replace(
        host,
        accelerator=_moving(host.accelerator, predicted(job, host, observed).optimizer / measured),
    )
    if observed.parts["work"] - _between_s(job, changed, observed) < LEFT * observed.parts["work"]:
        return host
    return changed


def _with_work(job: Job, host: Host, observed: Observed) -> Host:
    """The shares of the peak; that of the memory's bandwidth, too, where it leaves too little to products."""
    measured = observed.parts["work"]
    if measured < LEAST_S:
        return host
    for _ in range(ROUNDS):
        work, between = predicted(job, host, observed).work, _between_s(job, host, observed)
        if measured - between < LEFT * measured:
            host = replace(
                host,
                accelerator=_moving(_computing(host.accelerator, job, work / measured), work / measured),
            )
        else:
            factor = (work - between) / (measured - between)
            host = replace(host, accelerator=_computing(host.accelerator, job, factor))
    return host


def _with_sizes(host: Host, seen: Sequence[tuple[Job, Observed]]) -> Host:
    """Shares of the peak, and the FLOPs of a product that reaches half of that, by least squares of relative errors.

        work - between  =  a (FLOPs / rate)  +  b (products half_flops / rate)        a, b >= 0

    Then the rate is a-th as large, and half_flops b / a times.
    """
    base = replace(host, accelerator=replace(host.accelerator, half_flops=host.accelerator.half_flops or 1e6))
    at_once = replace(host, accelerator=replace(host.accelerator, half_flops=0.0))
    rows = []
    seen = [(job, one) for job, one in seen if one.parts["work"] >= LEAST_S]
    if not seen:
        return host
    for job, one in seen:
        between = _between_s(job, base, one)
        flops = predicted(job, at_once, one).work - between
        starts = predicted(job, base, one).work - between - flops
        left = max(one.parts["work"] - between, LEFT * one.parts["work"])
        rows.append((max(flops, LEAST_S) / left, max(starts, 0.0) / left))
    large, small = _least_squares(rows)
    job = seen[0][0]
    device = _computing(base.accelerator, job, 1 / large)
    return replace(host, accelerator=replace(device, half_flops=base.accelerator.half_flops * small / large))


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """`a > 0` and `b >= 0` for which all `a x + b y` are nearest to 1.

    >>> a, b = _least_squares([(1.0, 1.0), (0.5, 3.0)])
    >>> round(a, 6), round(b, 6)
    (0.8, 0.2)
    """
    xx, xy, yy = sum(x * x for x, _ in rows), sum(x * y for x, y in rows), sum(y * y for _, y in rows)
    x_sum, y_sum = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (x_sum * yy - y_sum * xy) / determinant, (y_sum * xx - x_sum * xy) / determinant
        if a > 0 and b >= 0:
            return a, b
    return x_sum / xx, 0.0


def _between_s(job: Job, host: Host, observed: Observed) -> float:
    """The part of the busiest rank's work that is neither product nor attention, and so not bound by the rate of
    products.
    """
    device = host.accelerator
    quicker = replace(device, peak={dtype: rate * NUDGE for dtype, rate in device.peak.items()})
    work = predicted(job, host, observed).work
    saved = work - predicted(job, replace(host, accelerator=quicker), observed).work
    return max(0.0, work - saved / (1 - 1 / NUDGE))


def _computing(device: Accelerator, job: Job, factor: float) -> Accelerator:
    """A device that computes so many times as fast; what its share of the peak cannot hold, the peak does."""
    share = {dtype: device.share.get(dtype, 0.7) for dtype in device.peak}
    most = max(factor * share[job.precision], factor * device.attention_share)
    beyond = max(1.0, most)
    return replace(
        device,
        peak={dtype: rate * beyond for dtype, rate in device.peak.items()},
        share={
            dtype: min(1.0, (factor if dtype == job.precision else 1.0) * own / beyond)
            for dtype, own in share.items()
        },
        attention_share=min(1.0, factor * device.attention_share / beyond),
    )


def _moving(device: Accelerator, factor: float) -> Accelerator:
    """A device that moves bytes so many times as fast."""
    beyond = max(1.0, factor * device.memory_share)
    return replace(
        device,
        bytes_per_s=device.bytes_per_s * beyond,
        memory_share=min(1.0, factor * device.memory_share / beyond),
    )


def _with_messages(job: Job, host: Host, observed: Observed) -> Host:
    """The rate of the link between stages: inside of the host, or the network where there are several hosts.

    A plan counts what is waited for. So of a message only that part counts which a crossing was waited for.
    """
    division = observed.division
    size = float(division.microbatch * job.sizes.seq * job.sizes.hidden * job.parameter_bytes)
    rounds = crossing_rounds(division, division.microbatches(job))
    taken_s = min(observed.message_s, observed.parts["crossings"] / rounds)
    if taken_s < LEAST_S:
        return host
    return _with_link(host, observed.hosts > 1, lambda link: _slower(link, size, taken_s))


def _slower(link: Link, size: float, measured_s: float) -> Link:
    """The link on which so many bytes take so long; a start that takes longer than half of it is shorter."""
    latency_s = min(link.latency_s, measured_s / 2)
    return replace(link, latency_s=latency_s, bytes_per_s=size / (measured_s - latency_s))


def _with_link(host: Host, outside: bool, change: Callable[[Link], Link]) -> Host:
    """A host with another link: the network, or the one inside."""
    if outside:
        return replace(host, network=change(host.network))
    return replace(host, inside=change(host.inside))


def _with_replicas(job: Job, host: Host, observed: Observed) -> Host:
    """The host with the share of the exchange that overlaps computation, or with another link where none can.

    The link is slower where less was exchanged than nothing was computed beside, and quicker where more was than fits
    beside all that was computed: then messages were waited for longer than they took.
    """
    division, measured = observed.division, observed.parts["replicas, exposed"]
    machines = _machines(host, observed)
    parts = StepTimes(job, machines).shares(division).parts
    numbers = max(rank_parameters(job, division, part) for part in parts)
    whole = exchanged_s(job, division, machines, division.microbatches(job), numbers, numbers)
    possible = min(max(whole, measured), measured + predicted(job, host, observed).work)
    if whole and possible != whole:
        factor = possible / whole
        if host.sharing is not None:
            host = replace(host, sharing=_longer(host.sharing, factor))
        outside = machines.ring(division.data, 1) is not host.inside
        host = _with_link(host, outside, lambda link: _longer(link, factor))
    hidden = 1.0 - measured / possible if possible else 0.0
    which = "parameters" if division.sharded == "parameters" else "data"
    return replace(host, conduct=replace(host.conduct, **{which: hidden}))


def _longer(link: Link, factor: float) -> Link:
    """The link on which everything takes so many times as long."""
    return replace(link, latency_s=link.latency_s * factor, bytes_per_s=link.bytes_per_s / factor)


def _with_crossings(job: Job, host: Host, observed: Observed) -> Host:
    """The host with the cost of a crossing besides its transfer: the waits that transfers do not explain."""
    division = observed.division
    free = replace(host, conduct=replace(host.conduct, crossing_s=0.0))
    more = observed.parts["crossings"] - predicted(job, free, observed).crossings
    rounds = crossing_rounds(division, division.microbatches(job))
    conduct: Conduct = replace(host.conduct, crossing_s=max(0.0, more / rounds))
    return replace(host, conduct=conduct)
