"""One battery for every rule: it fires on its fault, passes near it, and abstains where it cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.run import Device, Run, Sample
from weft.rules.configure import rules
from weft.rules.rule import Finding, Status, judge
from weft.timeline import WORK, Timeline

Made = Recorded | Run
Values = Callable[[int, int], dict[str, object]]


@dataclass(frozen=True)
class Case:
    """One rule's runs.

    Attributes:
        fires: A run with the fault.
        status: What the rule says of it.
        text: A part of its sentence.
        near: A run that is close to it, and passes.
        silent: A run of which the rule says nothing.
        why: How it says so.
    """

    fires: Made
    status: Status
    text: str
    near: Made | None
    silent: Made | None
    why: Status = Status.NOT_APPLICABLE


def ask(name: str, made: Made, *parameters: str) -> Finding:
    """What one rule says of a run."""
    (rule,) = [each for each in rules(parameters) if each.name == name]
    (found,) = judge([rule], Analysis(made.run() if isinstance(made, Recorded) else made))
    return found


def check(name: str, case: Case) -> None:
    """The battery."""
    found = ask(name, case.fires)
    assert (found.status, case.text in found.text) == (case.status, True), found
    assert found.evidence
    assert found.advice or case.status is Status.INFO
    if case.near is not None:
        assert ask(name, case.near).status is Status.PASS, ask(name, case.near)
    if case.silent is not None:
        assert ask(name, case.silent).status is case.why, ask(name, case.silent)


def sample(**values: object) -> Sample:
    """A host with two cores, half busy."""
    return Sample(0.0, **{"cores": (0.5, 0.5), **values})  # type: ignore[arg-type]


def gpu(busy: float, memory: float = 0.5) -> Device:
    """A GPU with 1000 bytes, of which a share is in use."""
    return Device(busy, round(1000 * memory), 1000)


def with_samples(run: Run, each: Callable[[int], Sample], count: int = 60) -> Run:
    """The run with other measures of its host, at even times."""
    apart = run.timeline.duration_s / count
    return replace(
        run, samples={"node": tuple(replace(each(number), at_s=number * apart) for number in range(count))}
    )


def with_gaps(run: Run, share: float) -> Run:
    """The run with so much of each pass turned into Python after it."""
    return replace(
        run,
        timeline=Timeline(
            replace(span, end_s=span.end_s - share * span.duration_s) if span.kind in WORK else span
            for span in run.timeline.spans
        ),
    )


def logging(values: Callable[[int], dict[str, float]]) -> Recorded:
    """Forty steps whose script logs values by step."""
    return Recorded(
        partitions=2, microbatches=16, steps=40, step_values=lambda rank, step: {"values": values(step)}
    )
