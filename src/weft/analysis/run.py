"""The data of a run: spans, each step's times, the machines' measures, what the script logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.timeline import Timeline

if TYPE_CHECKING:
    from weft.plan.measured.planned import Planned


@dataclass(frozen=True)
class Unit:
    """One unit of a model: where it lies, and what it was measured to cost for one microbatch."""

    name: str
    partition: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    parameter_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """The facts of one rank that do not change while it runs.

    Attributes:
        pp_rank: Its partition.
        rdp_rank: Its replica.
        start_s: When its process began, on the clock of the timeline.
        joined_s: When `weft.init` had ended, on the same clock.
        limit_bytes: The most memory that it may have; 0 if that is not known.
        cores: Those it may use.
        settings: Those of weft that matter here: partitions, microbatches, pipeline, optimize, ... Beside them what a
            frontend found: `measured_costs`, that units were measured with a microbatch of this job,
            `batch_norm_samples`, over how many samples a BatchNorm that trains takes its means, and `cut_layers`, how
            many layers ranks have parts of.
        units: Those of the models, if they were split; the same on all ranks.
        versions: Of weft, the framework, Python, the driver: name to text.
        base_bytes: The memory that it had in use beside its models before its first step; 0 if that is not known.
        planned: What the job expects of a step; the same on all ranks. None before the models are split, and where
            nobody recorded it.
    """

    rank: int
    ranks: int
    host: str = ""
    pid: int = 0
    pp_rank: int = 0
    rdp_rank: int = 0
    device: str = "cpu"
    start_s: float = 0.0
    joined_s: float = 0.0
    limit_bytes: int = 0
    cores: int = 0
    settings: Mapping[str, object] = field(default_factory=dict)
    units: tuple[Unit, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    base_bytes: int = 0
    planned: Planned | None = None


@dataclass(frozen=True)
class Step:
    """The times of one step on one rank; kept for every step, also where spans are not.

    Attributes:
        start_s: When it began, on the clock of the timeline.
        step_s: From there to the end of the step's function.
        data_s: Waiting for data, from the step before to this one.
        optimizer_s: The optimizer, after the step.
        work_s: F, B, I and W.
        wait_s: Waiting for other ranks.
        cpu_s: Processor time of the thread that runs the step, from the step's begin to its end.
        preempted: How often it lost its core to something else meanwhile (involuntary context switches).
        samples: Of the rank's mini-batch; 0 if that is not known.
        memory_bytes: The most that was in use: of the process on a CPU, of the device on a GPU.
        evaluates: The step had no backward pass.
        values: What the script logged with this step, and `gradient_norm` where weft computed one.
        checkpoint_s: Saving checkpoints, up to the begin of the next step.
        collector_s: Python's garbage collector, up to the begin of the next step.
        between_cpu_s: Processor time of the same thread from the step's end to the begin of the next one.
    """

    step: int
    start_s: float
    step_s: float
    data_s: float = 0.0
    optimizer_s: float = 0.0
    work_s: float = 0.0
    wait_s: float = 0.0
    cpu_s: float = 0.0
    preempted: int = 0
    samples: int = 0
    memory_bytes: int = 0
    evaluates: bool = False
    values: Mapping[str, float] = field(default_factory=dict)
    checkpoint_s: float = 0.0
    collector_s: float = 0.0
    between_cpu_s: float = 0.0


@dataclass(frozen=True)
class Device:
    """A GPU at one moment: shares from 0 to 1, bytes, watts, MHz; nan where it is not known."""

    busy: float
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    power_w: float = float("nan")
    clock_mhz: float = float("nan")
    throttled: bool = False


@dataclass(frozen=True)
class Sample:
    """A host at one moment. Rates are those since the sample before.

    Attributes:
        at_s: On the clock of the timeline.
        cores: For each core the share of the time that it was busy, from 0 to 1.
        io_wait: The share of the time in which a core waited for a disk only, over all cores.
        running: How many threads ran or wanted to (the run queue).
        memory_bytes: Of all processes.
        memory_limit_bytes: What the host has.
        read_rate: Bytes a second from disks.
        write_rate: Bytes a second to disks.
        sent_rate: Bytes a second to other hosts.
        received_rate: Bytes a second from other hosts.
        ours: The share of all cores' time that the job's ranks took, with the processes that they started.
        loaders: How many processes the job's ranks had started.
        loaders_share: The share of all cores' time that those took.
        others: The share of all cores' time that processes outside of the job took.
        devices: Its GPUs.
    """

    at_s: float
    cores: tuple[float, ...]
    io_wait: float = 0.0
    running: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    read_rate: float = 0.0
    write_rate: float = 0.0
    sent_rate: float = 0.0
    received_rate: float = 0.0
    ours: float = 0.0
    loaders: int = 0
    loaders_share: float = 0.0
    others: float = 0.0
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class ScriptLine:
    """Seconds of a run that a line of the script took between steps: asleep, and computing."""

    file: str
    line: int
    text: str
    asleep_s: float
    computing_s: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.asleep_s + self.computing_s

    @property
    def place(self) -> str:
        """The file's name, the line and its text."""
        return f"{self.file.rpartition('/')[2]}:{self.line} `{self.text}`"


@dataclass(frozen=True)
class Failed:
    """The failure of a job: the sentence that names the first rank, that rank, its step (0: before the first)."""

    headline: str
    rank: int
    step: int


@dataclass(frozen=True)
class Run:
    """A run as it was recorded.

    Attributes:
        name: What it is called: the folder's name.
        timeline: The spans, on one clock; of some steps only where the detail was limited.
        facts: By rank.
        steps: For each rank its steps, by number.
        samples: For each host its measures, by time.
        clock_error_s: How far the clocks of two ranks may be apart; 0 on one host.
        complete: The job has come to its end.
        warnings: What is missing or damaged, a sentence each.
        failed: How the job failed; None if it did not, or nobody could write that down.
        script: For each rank the lines of the script that took most between steps.
    """

    name: str
    timeline: Timeline
    facts: Mapping[int, Facts] = field(default_factory=dict)
    steps: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    clock_error_s: float = 0.0
    complete: bool = True
    warnings: tuple[str, ...] = ()
    failed: Failed | None = None
    script: Mapping[int, tuple[ScriptLine, ...]] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of which anything is known, ascending."""
        return tuple(sorted({*self.timeline.ranks, *self.facts, *self.steps}))
