"""Configurations of SageMaker Debugger: their names, their JSON, and what they ask weft for.

    read_job(text)     the JSON of CreateTrainingJob
    understand(...)    the arguments of an estimator, made with the names below

Both give an `Asked`: rules of `weft.rules` with their parameters, what to record, and notes on what is done otherwise.
Nothing in a configuration is run.
"""

from __future__ import annotations

from weft.compat.debugger import rule_configs
from weft.compat.debugger.asked import Asked, understand
from weft.compat.debugger.configs import (
    CollectionConfig,
    DataloaderProfilingConfig,
    DebuggerHookConfig,
    DetailedProfilingConfig,
    FrameworkProfile,
    HorovodProfilingConfig,
    ProfilerConfig,
    ProfilerRule,
    PythonProfiler,
    PythonProfilingConfig,
    Rule,
    SMDataParallelProfilingConfig,
    TensorBoardOutputConfig,
    cProfileTimer,
)
from weft.compat.debugger.job import read_job

__all__ = [
    "Asked", "CollectionConfig", "DataloaderProfilingConfig", "DebuggerHookConfig", "DetailedProfilingConfig",
    "FrameworkProfile", "HorovodProfilingConfig", "ProfilerConfig", "ProfilerRule", "PythonProfiler",
    "PythonProfilingConfig", "Rule", "SMDataParallelProfilingConfig", "TensorBoardOutputConfig", "cProfileTimer",
    "read_job", "rule_configs", "understand",
]  # fmt: skip
