"""The values that a session consists of, each with what is used together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from weft.config import Settings
from weft.report.placement import Opening
from weft.watch.progress import Progress

if TYPE_CHECKING:
    from weft.analysis.run import Unit
    from weft.plan.chosen import Chosen
    from weft.plan.measured.planned import Planned
    from weft.profiler.device import Event


class Closable(Protocol):
    """Something that the end of the job closes."""

    def close(self) -> None: ...


class Saves(Closable, Protocol):
    """The saves of this process."""

    pending: Any

    def finish(self) -> Any:
        """Wait for the save that goes on, if there is one; its error is raised here."""


class Values(Closable, Protocol):
    """Where the values go that a script logs."""

    def add(self, step: int, values: dict[str, float | str]) -> None: ...


class StepWatch(Protocol):
    """Called with what each step took."""

    def add(self, session: Any, step_s: float, microbatches: int) -> None: ...


@dataclass(frozen=True)
class Process:
    """The facts of this process that a recording has beside what the session knows.

    Attributes:
        device: Where its part of the model lies.
        limit_bytes: The most memory that it may have.
        versions: Of the framework and what it needs.
        base_bytes: The memory that it has in use beside its models, before its first step.
        cpu_s: Processor time of whatever runs steps.
        make_event: Makes an event of the device with timing, where work goes on there after it was handed over.
        captures: Whether work of the device is captured just now, as a CUDA graph, and does not run.
        observe: Has more of the framework recorded for a session, and gives what ends that.
    """

    device: str = "cpu"
    limit_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    base_bytes: int = 0
    cpu_s: Callable[[], float] = time.process_time
    make_event: Callable[[], Event] | None = None
    captures: Callable[[], bool] = lambda: False
    observe: Callable[[Any], list[Callable[[], None]]] = lambda session: []


@dataclass
class Recorded:
    """The facts that each recording of this process has, those that begin later, too.

    Attributes:
        process: Those of the process, as the frontend knows it.
        joined_s: When this process had joined, by `time.perf_counter`.
        recordings: How many recordings have begun.
        clock: Who compares the clock of this host with rank 0's while it is recorded.
        units: What the models were split into.
        planned: What is expected of a step.
        found: What else was found of the run, by name.
        forward: The microbatch of which a forward pass is recorded, and when that began; on ranks without a pipeline.
    """

    process: Process = field(default_factory=Process)
    joined_s: float = field(default_factory=time.perf_counter)
    recordings: int = 0
    clock: Closable | None = None
    units: list[Unit] = field(default_factory=list)
    planned: Planned | None = None
    found: dict[str, object] = field(default_factory=dict)
    forward: tuple[int, float] | None = None

    def note_base(self, base_bytes: int) -> None:
        """Before its first step this rank has so much in use beside its models: plans count what comes on top."""
        self.process = replace(self.process, base_bytes=max(0, base_bytes))


@dataclass
class Decisions:
    """Results of this process where the settings leave something open.

    Attributes:
        names: The settings that were left open, and decided here.
        number_reasons: Why there are so many microbatches, if that was decided here.
        last_number: Into how many microbatches the settings before these cut.
        chosen: The schedule that the first rank has made, where one was made.
        watch: Who compares steps with the prediction of `chosen`.
    """

    names: set[str] = field(default_factory=set)
    number_reasons: str = ""
    last_number: int = 1
    chosen: Chosen | None = None
    watch: StepWatch | None = None

    def use_schedule(self, chosen: Chosen, watch: StepWatch | None = None) -> None:
        """Run this schedule from now on. ``watch``: who compares its steps with it; as before if not given."""
        self.chosen, self.watch = chosen, watch or self.watch

    def follow_settings(self, old: Settings, settings: Settings) -> None:
        """Go on with other settings: schedules are chosen anew, and what the script says now is not decided here."""
        if isinstance(old.microbatches, int):
            self.last_number = old.microbatches
        self.number_reasons = ""
        self.names = {name for name in self.names if getattr(old, name) == getattr(settings, name)}
        self.chosen = self.watch = None


@dataclass
class Views:
    """Where people see the job while it runs.

    Attributes:
        opening: The line after the first step.
        progress: The line of progress, on the rank that shows it.
        values: Where logged values go, on the rank that writes them.
        findings: Reports findings of the rules to the script.
    """

    opening: Opening = field(default_factory=Opening)
    progress: Progress | None = None
    values: Values | None = None
    findings: Closable | None = None

    def close(self) -> None:
        """No more is shown, or logged; findings are still reported."""
        for each in (self.progress, self.values):
            if each is not None:
                each.close()

    def report_findings(self, findings: Closable | None) -> None:
        """Report findings by these from now on; those before have a last look."""
        if self.findings is not None:
            self.findings.close()
        self.findings = findings
