"""Configurations that scripts make: of the hook, of the profiler, and of rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from weft.compat.debugger.rule_configs import Action, RuleConfig
from weft.errors import ConfigError, UsageError
from weft.untrusted import shown


@dataclass(frozen=True)
class CollectionConfig:
    """A group of tensors: its name, and parameters as texts."""

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DebuggerHookConfig:
    """The groups of tensors to save, and where."""

    s3_output_path: str | None = None
    container_local_output_path: str | None = None
    hook_parameters: Mapping[str, str] | None = None
    collection_configs: Sequence[CollectionConfig] = ()


@dataclass(frozen=True)
class TensorBoardOutputConfig:
    """Where TensorBoard's files are to be."""

    s3_output_path: str
    container_local_output_path: str | None = None


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


@dataclass(frozen=True)
class Rule:
    """A rule that is asked for, about tensors in the original.

    Attributes:
        rule: The original's name of it.
        parameters: By name.
        actions: What is to be done when it finds something.
    """

    rule: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    collections: tuple[CollectionConfig, ...] = ()

    @classmethod
    def sagemaker(
        cls,
        base_config: RuleConfig,
        name: str | None = None,
        rule_parameters: Mapping[str, object] | None = None,
        collections_to_save: Iterable[CollectionConfig] | None = None,
        actions: Action | Iterable[Action] | None = None,
        **places: Any,
    ) -> Rule:
        """One of the original's rules; names of outputs (``places``) mean nothing here."""
        given = dict(rule_parameters or {})
        if "rule_to_invoke" in given:
            raise UsageError("rule_parameters has rule_to_invoke: the base_config says which rule it is")
        return cls(
            base_config.rule,
            {**base_config.parameters, **given},
            (actions,) if isinstance(actions, Action) else tuple(actions or ()),
            tuple(collections_to_save or ()),
        )

    @classmethod
    def custom(cls, name: str, *_: Any, **__: Any) -> NoReturn:
        """Refused: a rule of one's own is no image here."""
        raise UsageError(
            f'the rule "{name}" runs in an image of its own: write it as a class of ten lines, and give it to '
            "`weft report --rules module:Class`"
        )


class ProfilerRule(Rule):
    """A rule of the profiler that is asked for."""
