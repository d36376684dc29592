"""The description of a training job (CreateTrainingJob), as JSON: what it asks weft for.

People write it by hand, with comments, and commas before a closing bracket.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
    PythonProfilingConfig,
    Rule,
    SMDataParallelProfilingConfig,
)
from weft.errors import ConfigError, FormatError
from weft.rules.configure import nearest
from weft.untrusted import LARGEST, parse_json, shown, shown_text, whole

MOST_CHARACTERS = 1 << 20
"""No description of a job is longer."""

_STRING = r'"(?:[^"\\]|\\.?)*(?:"|\Z)'
_COMMENTS = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_COMMAS = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)


def read_json(text: str) -> Any:
    """The value of a JSON text that may have comments (`//`, `#`, `/* */`) and commas before `}` and `]`.

    Nothing in it is run.

    >>> read_json('{"a": [1, 2,], // two\\n "b": "# none",}')
    {'a': [1, 2], 'b': '# none'}

    Raises:
        FormatError: It is no JSON besides.
    """
    if len(text) > MOST_CHARACTERS:
        raise FormatError(f"the text has more than {MOST_CHARACTERS} characters: is it the right file?")
    for pattern in (_COMMENTS, _COMMAS):
        text = pattern.sub(lambda match: match[1] or "", text)
    return parse_json(text)


KINDS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "DetailedProfilingConfig": ("detailed_profiling_config", DetailedProfilingConfig),
    "DataloaderProfilingConfig": ("dataloader_profiling_config", DataloaderProfilingConfig),
    "PythonProfilingConfig": ("python_profiling_config", PythonProfilingConfig),
    "HorovodProfilingConfig": ("horovod_profiling_config", HorovodProfilingConfig),
    "SMDataParallelProfilingConfig": ("smdataparallel_profiling_config", SMDataParallelProfilingConfig),
}
RANGE = {
    "StartStep": "start_step",
    "NumSteps": "num_steps",
    "StartTimeInSecSinceEpoch": "start_unix_time",
    "Duration": "duration",
    "DurationInSeconds": "duration",
}
"""Keys of a range; the original wrote one name of the duration and read the other."""
BESIDE = ("ProfilerName", "cProfileTimer", "MetricsRegex", "ProfileDefaultSteps")
"""Keys of a configuration that choose what weft records anyhow, or never does."""
FILES = ("LocalPath", "RotateMaxFileSizeInBytes", "RotateFileCloseIntervalInSeconds", "FileOpenFailThreshold")


def read_job(text: str) -> Asked:
    """The requests in a job's description.

    Args:
        text: JSON, also with comments and superfluous commas. Keys that are not about Debugger are left alone.

    Raises:
        FormatError: It is no JSON.
        ConfigError: A value in it is not what it should be; the error names its place.
    """
    job = _mapping(read_json(text), "the job")
    asked = [
        *_rules(job, "DebugRuleConfigurations", Rule),
        *_rules(job, "ProfilerRuleConfigurations", ProfilerRule),
    ]
    hook = _mapping(job.get("DebugHookConfig") or {}, "DebugHookConfig")
    collections = [
        CollectionConfig(
            _text(_mapping(each, "CollectionConfigurations").get("CollectionName"), "CollectionName")
        )
        for each in _list(hook.get("CollectionConfigurations") or [], "CollectionConfigurations")
    ]
    return understand(
        _profiler(_mapping(job.get("ProfilerConfig") or {}, "ProfilerConfig")),
        asked,
        DebuggerHookConfig(collection_configs=collections),
        _flag(job.get("DisableProfiler", False), "DisableProfiler"),
    )


def _profiler(config: Mapping[str, Any]) -> ProfilerConfig:
    every = config.get("ProfilingIntervalInMilliseconds")
    parameters = config.get("ProfilingParameters")
    return ProfilerConfig(
        _text(config.get("S3OutputPath") or "", "S3OutputPath"),
        None if every is None else _number(every, "ProfilingIntervalInMilliseconds"),
        None if parameters is None else _profile(_mapping(parameters, "ProfilingParameters")),
        _flag(config.get("DisableProfiler", False), "DisableProfiler"),
    )


def _profile(parameters: Mapping[str, Any]) -> FrameworkProfile:
    """Each configuration is JSON in a text."""
    configs: dict[str, Any] = dict(_range(parameters, "ProfilingParameters", (*KINDS, *FILES)))
    for key, (name, kind) in KINDS.items():
        if key in parameters:
            text = parameters[key]
            inner = _mapping(read_json(text) if isinstance(text, str) else text, key)
            configs[name] = kind(**_range(inner, key, BESIDE))
    return FrameworkProfile(_text(parameters.get("LocalPath") or "", "LocalPath"), **configs)


def _range(values: Mapping[str, Any], where: str, beside: Iterable[str]) -> dict[str, int]:
    """The range that keys say; other keys are known ones, or refused."""
    known = (*RANGE, *beside)
    for key in values:
        if key not in known:
            hint = nearest(key, known) or f"known are {', '.join(known)}"
            raise ConfigError(f'{where} has the key "{shown_text(key)}": {hint}')
    return {name: _number(values[key], f"{where}.{key}") for key, name in RANGE.items() if key in values}


def _rules(job: Mapping[str, Any], key: str, kind: type[Rule]) -> list[Rule]:
    found = []
    for number, each in enumerate(_list(job.get(key) or [], key)):
        where = f"{key}[{number}]"
        config = _mapping(each, where)
        parameters = dict(_mapping(config.get("RuleParameters") or {}, f"{where}.RuleParameters"))
        name = parameters.pop("rule_to_invoke", None) or config.get("RuleConfigurationName")
        found.append(kind(_text(name, f"{where}.RuleParameters.rule_to_invoke"), parameters))
    return found


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(value, where, "an object, { ... }")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _refused(value, where, "a list, [ ... ]")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _refused(value, where, "a text")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _refused(value, where, "true or false")
    return value


def _number(value: object, where: str) -> int:
    """A whole number, also one in a text."""
    found = whole(value) if isinstance(value, str) else value
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= LARGEST:
        raise _refused(value, where, "a whole number from 0 on")
    return found


def _refused(value: object, where: str, expected: str) -> ConfigError:
    return ConfigError(f"{where} is {shown(value)}: write {expected}")
