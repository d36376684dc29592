"""A run beside its plan: the step, each partition's work and waiting, memory; and which of them was missed most.

The plan is the job's own, or what `weft plan --json` has said of it before it ran.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from weft.analysis.measured import Measured
from weft.analysis.parts import Parts
from weft.analysis.run import Facts
from weft.document import Document
from weft.errors import UsageError
from weft.plan.measured.planned import Planned
from weft.timeline import WORK, Timeline
from weft.units import format_bytes, format_seconds
from weft.untrusted import parse_json

COUNTED = "without what was in use before the first step beside the model"
MISSED = 0.10
"""A step that differs from its plan by more than this share of the plan has missed it."""
CAUSE = 1 / 3
"""A term of work is the cause if it differs by at least this part of what the step does; else waiting is."""
MEMORY_MISSED = 0.25
LARGE_BYTES = 256 << 20
"""Less memory than this is not compared in words: what libraries take is as much."""


class Term(NamedTuple):
    """A figure of the plan beside the measured one.

    Attributes:
        name: What it is.
        planned: In seconds or bytes.
        measured: In the same unit; the mean of usual steps.
        partition: Whose it is; None for that of all.
    """

    name: str
    planned: float
    measured: float
    partition: int | None = None

    @property
    def more(self) -> float:
        """The excess of the measured over the planned value."""
        return self.measured - self.planned

    @property
    def where(self) -> str:
        """Its name, and the partition if it is of one."""
        return self.name if self.partition is None else f"{self.name} of partition {self.partition}"


@dataclass(frozen=True)
class BesidePlan:
    """A run beside its plan.

    Attributes:
        step: The step that was planned.
        terms: What it is made of, in seconds.
        memory: What ranks have in use, in bytes.
        source: Whose plan it is.
        counted: What belongs to the memory, or does not.
    """

    step: Term
    terms: tuple[Term, ...]
    memory: tuple[Term, ...] = ()
    source: str = "the job's own plan"
    counted: str = COUNTED

    @property
    def share(self) -> float:
        """By which share of the plan the step differs from it; above 0 if it takes longer."""
        return self.step.more / self.step.planned if self.step.planned else 0.0

    @cached_property
    def missed(self) -> Term | None:
        """The term that accounts for most of the difference, if the step has missed its plan."""
        if abs(self.share) <= MISSED or not self.terms:
            return None
        sign = 1.0 if self.step.more > 0.0 else -1.0
        most = max((one for one in self.terms if one.name != WAITING), key=lambda one: sign * one.more)
        if sign * most.more >= CAUSE * abs(self.step.more):
            return most
        return max(self.terms, key=lambda one: sign * one.more)

    @property
    def text(self) -> str:
        """The distance of the step from its plan, and what accounts for it."""
        words = (
            f"By {self.source} a step takes {format_seconds(self.step.planned)}; it took "
            f"{format_seconds(self.step.measured)} ({self.share:+.0%})"
        )
        if abs(self.share) <= MISSED:
            words += ", as planned"
        elif self.missed is not None:
            words += (
                f". Most of that: {self.missed.where}, planned {format_seconds(self.missed.planned)}, measured "
                f"{format_seconds(self.missed.measured)}"
            )
        return f"{words}.{self._of_memory()}"

    def _of_memory(self) -> str:
        """The rank whose memory is furthest from its plan, if that is far."""
        far = [
            one
            for one in self.memory
            if max(one.planned, one.measured) >= LARGE_BYTES and abs(one.more) > MEMORY_MISSED * one.planned
        ]
        if not far:
            return ""
        one = max(far, key=lambda each: abs(each.more))
        return (
            f" {one.where.capitalize()} is {format_bytes(one.measured)}, planned {format_bytes(one.planned)}."
        )


WAITING = "waiting"
"""Of a partition, from the first to the last microbatch of a step: for transfers, and with nothing to run."""


class Seen(Measured, Protocol):
    """The part of an analysis that is read here."""

    @property
    def typical(self) -> Mapping[int, Parts]:
        """For each rank the mean parts of a usual step."""

    @property
    def usual_steps(self) -> frozenset[int]:
        """The steps that count."""

    def facts(self, rank: int) -> Facts:
        """The facts of a rank."""


def beside_plan(analysis: Seen) -> BesidePlan | None:
    """The run beside the plan that the job itself has made; nothing where it recorded none, or has no usual step."""
    planned = next((each.planned for each in analysis.run.facts.values() if each.planned is not None), None)
    if planned is None or planned.step_s <= 0.0:
        return None
    own: dict[int, list[int]] = {}
    for rank in analysis.typical:
        own.setdefault(analysis.partitions[rank], []).append(rank)
    taken = window_s(analysis.timeline, analysis.usual_steps)
    if not taken or sorted(own) != list(range(len(planned.parts))):
        return None
    terms = []
    for partition, part in enumerate(planned.parts):
        parts = [analysis.typical[rank] for rank in own[partition]]
        forward_s = statistics.median_low(each.forward for each in parts)
        backward_s = statistics.median_low(each.work - each.forward for each in parts)
        terms += [
            Term("forward pass", part.forward_s, forward_s, partition),
            Term("backward pass", part.backward_s, backward_s, partition),
            Term(
                WAITING,
                max(0.0, planned.step_s - part.work_s),
                max(0.0, taken - forward_s - backward_s),
                partition,
            ),
        ]
    on_cpu = any(facts.device == "cpu" for facts in analysis.run.facts.values())
    return BesidePlan(
        Term("the microbatches", planned.step_s, taken), tuple(terms), tuple(_memory(analysis, planned, own)),
        counted=f"{COUNTED}, with what malloc keeps free for the next step" if on_cpu else COUNTED,
    )  # fmt: skip


def _memory(analysis: Seen, planned: Planned, own: Mapping[int, list[int]]) -> Iterable[Term]:
    for partition, part in enumerate(planned.parts):
        most = max((used_bytes(analysis, rank) for rank in own[partition]), default=0)
        if most and part.memory_bytes:
            yield Term("memory", part.memory_bytes, most, partition)


def used_bytes(analysis: Seen, rank: int) -> int:
    """The most memory that a rank had in use, without what it had before its first step beside models; 0 if unknown."""
    most = max((step.memory_bytes for step in analysis.steps(rank)), default=0)
    return max(0, most - analysis.facts(rank).base_bytes)


def window_s(timeline: Timeline, steps: frozenset[int]) -> float:
    """The mean time from the first to the last F, B, I or W of such a step, over all ranks; 0 if there is none."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for span in timeline.spans:
        if span.kind in WORK and span.step in steps:
            first[span.step] = min(span.start_s, first.get(span.step, span.start_s))
            last[span.step] = max(span.end_s, last.get(span.step, span.end_s))
    return statistics.fmean(last[step] - first[step] for step in first) if first else 0.0


TERMS = {
    "work": "work",
    "bubble": "bubble",
    "crossings": "transfer",
    "replicas, exposed": "reduce",
    "optimizer": "optimizer",
}
"""The terms of a plan's step, and the parts of a recorded one that they become."""
USUAL = {
    "partitions": 1, "microbatches": 1, "pipeline": "1f1b", "shard_optimizer_state": False,
    "sharded_data_parallel_degree": 1,
}  # fmt: skip
"""The settings in which divisions differ, with their defaults."""
FOLLOWS = ("auto", "list")
"""Only the job knows what runs by these; any schedule of the plan may stand beside it."""
REST = "all else: late ranks, data, the script"


def beside_answer(analysis: Seen, text: str, name: str) -> BesidePlan:
    """A run beside the division of the plan that ran.

    Args:
        analysis: The run.
        text: What `weft plan --json` printed.
        name: Of its file.

    Raises:
        FormatError: It is no plan; the fault is named by its path.
        UsageError: No division of the plan is what ran, or nothing is known of how the run was.
    """
    if not analysis.typical:
        raise UsageError("--plan compares usual steps, and the recording has none: record more steps")
    entry = _that_ran(analysis, list(_entries(Document(parse_json(text, "this is not a plan")))), name)
    busiest = max(analysis.typical.values(), key=lambda each: each.work)
    terms: list[Term] = []
    if "step" in entry:
        planned = {term: entry["step"][term].number() for term in TERMS}
        measured = {term: float(getattr(busiest, part)) for term, part in TERMS.items()}
        terms = [Term(term, planned[term], measured[term]) for term in TERMS]
        rest = entry["step_s"].number() - sum(planned.values())
        terms.append(Term(REST, max(0.0, rest), max(0.0, busiest.total - sum(measured.values()))))
    most = max((step.memory_bytes for rank in analysis.typical for step in analysis.steps(rank)), default=0)
    memory = (Term("memory of the fullest rank", entry["memory_bytes"].number(), most),) if most else ()
    return BesidePlan(
        Term("the whole step", entry["step_s"].number(), analysis.step_s),
        tuple(terms),
        memory,
        f"the plan {name}",
    )


def _entries(document: Document) -> Iterator[Document]:
    """All divisions that a plan has: of sizes, or of a traced model."""
    if isinstance(document.value, list):
        yield from document
        return
    yield from document["best"]
    kinds = document["of_kind"]
    if isinstance(kinds.value, dict):
        yield from (kinds[kind] for kind in kinds.value)
    if document["runs_today"].value is not None:
        yield document["runs_today"]


def _that_ran(analysis: Seen, entries: list[Document], name: str) -> Document:
    """The division with the settings of the run."""
    ran = {setting: analysis.setting(setting, usual) for setting, usual in USUAL.items()}
    ranks = len(analysis.run.ranks)
    for entry in entries:
        division, settings = entry["division"], entry["settings"]
        if "partitions" not in settings:  # weft cannot run it
            continue
        planned = {
            setting: settings[setting].value if setting in settings else usual
            for setting, usual in USUAL.items()
        }
        if ran["partitions"] == 1 or ran["pipeline"] in FOLLOWS:
            planned["pipeline"] = ran["pipeline"]
        if planned == ran and division["data"].whole() * division["pipeline"].whole() == ranks:
            return entry
    shown = ", ".join(f'"{setting}": {json.dumps(value)}' for setting, value in ran.items() if value)
    raise UsageError(
        f"{name} has no division like what ran, {ranks} ranks with {shown}: run one that the plan names, with its "
        "settings, or leave --plan out for the job's own plan"
    )
