"""`ProfilerConfig` and `FrameworkProfile`: what is to be recorded, how often and in which steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from weft.errors import ConfigError
from weft.untrusted import shown

INTERVALS_MS = (100, 200, 500, 1000, 5000, 60000)


class PythonProfiler(str, Enum):
    """The profiler of Python's functions; weft has none."""

    CPROFILE = "cprofile"
    PYINSTRUMENT = "pyinstrument"


class cProfileTimer(str, Enum):
    """The time that cProfile measures."""

    TOTAL_TIME = "total_time"
    CPU_TIME = "cpu_time"
    OFF_CPU_TIME = "off_cpu_time"


@dataclass(frozen=True)
class MetricsConfig:
    """A range of steps or of time in which something is recorded in detail.

    Attributes:
        start_unix_time: Seconds since 1970.
        duration: Seconds.
    """

    start_step: int | None = None
    num_steps: int | None = None
    start_unix_time: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        for name in ("start_step", "num_steps", "start_unix_time", "duration"):
            value = getattr(self, name)
            whole = isinstance(value, int) or (
                name == "duration" and isinstance(value, float) and value < 1e12
            )
            if value is not None and (not whole or isinstance(value, bool) or value < 0):
                raise ConfigError(f"{name} is {shown(value)}: write a number from 0 on")
        if self.by_step and self.by_time:
            raise ConfigError(
                "a range is given by steps (start_step, num_steps) and by time (start_unix_time, duration): leave one "
                "out"
            )

    @property
    def by_step(self) -> bool:
        """The range is one of steps."""
        return self.start_step is not None or self.num_steps is not None

    @property
    def by_time(self) -> bool:
        """The range is one of time."""
        return self.start_unix_time is not None or self.duration is not None


class _Default(MetricsConfig):
    """A range that has a step of its own if nothing is said."""

    step, steps = 5, 1

    def __init__(
        self,
        start_step: int | None = None,
        num_steps: int | None = None,
        start_unix_time: int | None = None,
        duration: float | None = None,
        profile_default_steps: bool = False,
        *,
        metrics_regex: str = "",
        python_profiler: PythonProfiler | str = "",
        cprofile_timer: cProfileTimer | str = "",
    ) -> None:
        del (
            metrics_regex,
            python_profiler,
            cprofile_timer,
        )  # they choose what weft records anyhow, or never does
        nothing = start_step is num_steps is start_unix_time is duration is None
        if profile_default_steps or nothing:
            start_step, num_steps, start_unix_time, duration = self.step, self.steps, None, None
        super().__init__(start_step, num_steps, start_unix_time, duration)


class DetailedProfilingConfig(_Default):
    """When operations are recorded."""


class DataloaderProfilingConfig(_Default):
    """When data loaders are recorded."""

    step = 7


class PythonProfilingConfig(_Default):
    """When Python's functions are recorded."""

    step, steps = 9, 3


class HorovodProfilingConfig(_Default):
    """When Horovod is recorded."""

    step = 13


class SMDataParallelProfilingConfig(_Default):
    """When sums of gradients are recorded."""

    step = 15


@dataclass(frozen=True)
class FrameworkProfile:
    """The parts of the training to record in detail, and when.

    Of the configurations those that are given count. If there is none, the range given here does for all, and without
    one each kind's own default.
    """

    local_path: str = ""
    file_max_size: int | None = None
    file_close_interval: int | None = None
    file_open_fail_threshold: int | None = None
    detailed_profiling_config: DetailedProfilingConfig | None = None
    dataloader_profiling_config: DataloaderProfilingConfig | None = None
    python_profiling_config: PythonProfilingConfig | None = None
    horovod_profiling_config: HorovodProfilingConfig | None = None
    smdataparallel_profiling_config: SMDataParallelProfilingConfig | None = None
    start_step: int | None = None
    num_steps: int | None = None
    start_unix_time: int | None = None
    duration: float | None = None

    @property
    def ranges(self) -> tuple[MetricsConfig, ...]:
        """When detail is recorded."""
        given = (
            self.detailed_profiling_config,
            self.dataloader_profiling_config,
            self.python_profiling_config,
            self.horovod_profiling_config,
            self.smdataparallel_profiling_config,
        )
        if chosen := tuple(each for each in given if each is not None):
            return chosen
        own = MetricsConfig(self.start_step, self.num_steps, self.start_unix_time, self.duration)
        return (own,) if own.by_step or own.by_time else (DetailedProfilingConfig(), PythonProfilingConfig())


@dataclass(frozen=True)
class ProfilerConfig:
    """The interval at which hosts are measured, and the parts of the training to record in detail."""

    s3_output_path: str | None = None
    system_monitor_interval_millis: int | None = None
    framework_profile_params: FrameworkProfile | None = None
    disable_profiler: bool = False

    def __post_init__(self) -> None:
        every = self.system_monitor_interval_millis
        if every is not None and every not in INTERVALS_MS:
            raise ConfigError(
                f"system_monitor_interval_millis is {shown(every)}: write one of {', '.join(map(str, INTERVALS_MS))}"
            )
