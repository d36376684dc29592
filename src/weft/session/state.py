"""The values that a session consists of, each with what is used together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from weft.analysis.run import Unit
    from weft.plan.measured.planned import Planned
    from weft.profiler.device import Event


class Closable(Protocol):
    """Something that the end of the job closes."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Process:
    """The facts of this process that a recording tells beside what the session knows.

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
