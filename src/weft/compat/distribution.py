"""The original's ``distribution``: which launcher it asks for, how many processes, and settings of the model's split.

    {"smdistributed": {"modelparallel": {"enabled": true, "parameters": {"partitions": 2}}},
     "mpi": {"enabled": true, "processes_per_host": 2, "custom_mpi_options": "-x NCCL_DEBUG=INFO"}}

Meanings and checks are the original's, but for these: GPUs are not demanded, pairs of launchers of which the original
takes one are refused, and options for ``mpirun`` are read with their quotes, and only if they are harmless.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.compat.modelparallel.parameters import OWN, canonical
from weft.compat.variables import FRAMEWORK, PARAMETERS
from weft.errors import ConfigError, FormatError
from weft.untrusted import MOST_RANKS, listed, parse_json, read_text, shown, shown_text, translated

LAUNCHERS = ("mpi", "torch_distributed", "pytorchddp")
_KNOWN = ("smdistributed", *LAUNCHERS)
_LIBRARIES = ("modelparallel", "dataparallel")
_FRAMEWORK = {
    "mpi": "sagemaker_mpi_enabled",
    "torch_distributed": "sagemaker_torch_distributed_enabled",
    "dataparallel": "sagemaker_distributed_dataparallel_enabled",
    "pytorchddp": "sagemaker_distributed_dataparallel_enabled",
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "pipeline": ("simple", "interleaved", "_only_forward"),
    "optimize": ("speed", "memory"),
}
_POSITIVE = ("microbatches", "partitions", "pipeline_parallel_degree", "active_microbatches")
_BOOLEAN = (
    "auto_partition", "contiguous", "load_partition", "horovod", "ddp", "deterministic_server",
)  # fmt: skip
MPI_OPTIONS: dict[str, int] = {
    "-mca": 2, "--mca": 2, "-bind-to": 1, "--bind-to": 1, "-map-by": 1, "--map-by": 1, "-rank-by": 1, "--rank-by": 1,
    "-tag-output": 0, "--tag-output": 0, "-display-map": 0, "--display-map": 0, "-oversubscribe": 0,
    "--oversubscribe": 0, "-report-bindings": 0, "--report-bindings": 0, "-verbose": 0, "--verbose": 0,
}  # fmt: skip
"""Options of ``mpirun`` that are handed on, each with the number of its values."""
MCA = ("btl", "coll", "mtl", "oob", "opal_cuda", "orte_abort", "pml", "rmaps", "hwloc", "smsc", "topo", "osc")
"""Beginnings of the parameters for ``-mca`` that are handed on: those of transports, bindings and algorithms.
Others name programs and files that would be run or loaded."""


@dataclass(frozen=True)
class Distribution:
    """The requests of a ``distribution``.

    Attributes:
        engine: ``mpirun``, ``torchrun``, or nothing if it does not say.
        processes_per_host: How many ranks a host has, if that is said.
        parameters: The settings of the model's split.
        variables: Variables of the ranks.
        hand_on: Names of variables that ranks get as they are here.
        mpi_options: Further arguments of ``mpirun``.
        framework: The same as it reaches scripts of the original, by ``SM_FRAMEWORK_PARAMS``.
    """

    engine: str = ""
    processes_per_host: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    hand_on: Sequence[str] = ()
    mpi_options: Sequence[str] = ()
    framework: Mapping[str, Any] = field(default_factory=dict)

    def hand_over(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables of the ranks, those that are handed on with their values in ``environ``, if they have one."""
        handed = {name: environ[name] for name in self.hand_on if name in environ}
        return {**handed, **self.variables}

    def settings(self) -> dict[str, str]:
        """The variables with the parameters: all for scripts of the original, and what weft knows for any script."""
        framework = {FRAMEWORK: json.dumps(dict(self.framework))} if self.framework else {}
        if not self.parameters:
            return framework
        named = canonical(self.parameters, "distribution")
        if named.get("pipeline") == "_only_forward":
            named["pipeline"] = "simple"
        own = {name: value for name, value in named.items() if name in OWN}
        return {**framework, PARAMETERS: json.dumps(dict(self.parameters)), "WEFT_CONFIG": json.dumps(own)}


def read(given: Mapping[str, Any] | str) -> Distribution:
    """The requests of a ``distribution``: a dict, JSON text, or the path of a JSON file.

    Raises:
        ConfigError: It is no ``distribution``, or what it says does not go together; all faults are named.

    >>> read('{"mpi": {"enabled": true, "processes_per_host": 2}}').processes_per_host
    2
    """
    content = _content(given, "distribution")
    parts = {name: _part(content, name) for name in content}
    faults = [*_faults(content, parts)]
    if faults:
        raise ConfigError("distribution: " + "; ".join(faults))
    on = {name: part for name, part in parts.items() if _enabled(part)}
    libraries = {name: part for name, part in _libraries(content).items() if _enabled(part)}
    parameters = _content(libraries.get("modelparallel", {}).get("parameters") or {}, "parameters")
    if faults := [*_parameter_faults(parameters)]:
        raise ConfigError("distribution: parameters: " + "; ".join(faults))
    engine = "mpirun" if "mpi" in on or "pytorchddp" in on else ""
    engine = "torchrun" if "torch_distributed" in on else engine
    options = (
        on.get("mpi", on.get("pytorchddp", libraries.get("dataparallel", {}))).get("custom_mpi_options") or ""
    )
    variables, hand_on, more = mpi_options(options)
    processes = on.get("mpi", {}).get("processes_per_host") or None
    framework = {key: True for name, key in _FRAMEWORK.items() if name in on or name in libraries}
    if "mpi" in on and processes:
        framework["sagemaker_mpi_num_of_processes_per_host"] = processes
    return Distribution(engine, processes, parameters, variables, hand_on, more, framework)


def mpi_options(given: str | Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Variables, names of variables, and arguments of ``mpirun`` out of ``custom_mpi_options``.

    Raises:
        ConfigError: Quotes do not close, or an option is none of those that are handed on.

    >>> mpi_options('--NCCL_DEBUG WARN -x A="a b" -x B -mca btl tcp,self')
    ({'NCCL_DEBUG': 'WARN', 'A': 'a b'}, ['B'], ['-mca', 'btl', 'tcp,self'])
    """
    variables: dict[str, str] = {}
    names: list[str] = []
    kept: list[str] = []
    refused: list[str] = []
    words = iter(_words(given))
    for word in words:
        if word == "-x":
            name, equals, value = next(words, "").partition("=")
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                refused.append(f"-x {shown_text(name)}")
            elif equals:
                variables[name] = value
            else:
                names.append(name)
        elif word in ("--NCCL_DEBUG", "-NCCL_DEBUG"):
            variables["NCCL_DEBUG"] = next(words, "")
        elif word.startswith("--NCCL_DEBUG="):
            variables["NCCL_DEBUG"] = word.partition("=")[2]
        else:
            values = [next(words, "") for _ in range(MPI_OPTIONS.get(word, 0))]
            if (
                word not in MPI_OPTIONS
                or "" in values
                or (word.endswith("mca") and not values[0].startswith(MCA))
            ):
                refused.append(" ".join([word, *values]))
            kept += [word, *values]
    if refused:
        raise ConfigError(
            f"distribution: custom_mpi_options has {listed(refused)}: give -x, {', '.join(sorted(MPI_OPTIONS))}, "
            f"and for -mca what begins with {', '.join(MCA)}; other options belong to weft run --mpi-options"
        )
    return variables, names, kept


def _words(given: str | Sequence[str]) -> list[str]:
    if (
        isinstance(given, Sequence)
        and not isinstance(given, str)
        and all(isinstance(word, str) for word in given)
    ):
        return [*given]
    if not isinstance(given, str):
        raise ConfigError(
            f"distribution: custom_mpi_options is {shown(given)}: write a text, or a list of texts"
        )
    try:
        return shlex.split(given)
    except ValueError as error:
        raise ConfigError(
            f"distribution: custom_mpi_options cannot be read: {error}: {shown_text(given)}"
        ) from None


def _content(given: Mapping[str, Any] | str, what: str) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            text = given if given.lstrip().startswith("{") else read_text(given)
            given = parse_json(text, f"{what} is not JSON")
        except FormatError as error:
            raise ConfigError(f"{what}: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} is {shown(given)}: write an object")
    with translated(f"{what} has a value that JSON has not", ConfigError):
        json.dumps(dict(given))
    return given


def _part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = content[name]
    return part if isinstance(part, Mapping) else {}


def _libraries(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    given = _part(content, "smdistributed") if "smdistributed" in content else {}
    return {str(name): _part(given, name) for name in given}


def _enabled(part: Mapping[str, Any]) -> bool:
    return part.get("enabled") is True


def _faults(content: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, part in content.items():
        if name not in _KNOWN:
            yield f"{shown_text(str(name))} is not known: it is one of {', '.join(_KNOWN)}"
        elif not isinstance(part, Mapping):
            yield f'{name} is {shown(part)}: write an object, for example {{"enabled": true}}'
    libraries = _libraries(content)
    if "smdistributed" in content and (len(libraries) != 1 or not {*libraries} <= {*_LIBRARIES}):
        yield f"smdistributed has {listed(libraries) or 'nothing'}: give one of {' and '.join(_LIBRARIES)}"
    for name, part in [*parts.items(), *libraries.items()]:
        if "enabled" in part and not isinstance(part["enabled"], bool):
            yield f"enabled of {shown_text(str(name))} is {shown(part['enabled'])}: write true or false"
    on = [name for name in LAUNCHERS if _enabled(parts.get(name, {}))]
    if len(on) > 1:
        yield f"{' and '.join(on)} both start processes: enable one"
    if _enabled(parts.get("pytorchddp", {})) and "dataparallel" in libraries:
        yield "pytorchddp and smdistributed.dataparallel mean the same: give one"
    processes = parts.get("mpi", {}).get("processes_per_host")
    if processes is not None and (type(processes) is not int or not 0 <= processes <= MOST_RANKS):
        yield f"processes_per_host is {shown(processes)}: write a whole number, for example 8"


def _parameter_faults(given: Mapping[str, Any]) -> Iterator[str]:
    for name, allowed in _CHOICES.items():
        if name in given and given[name] not in allowed:
            yield f"{name} is {shown(given[name])}: it is one of {', '.join(allowed)}"
    strategy = given.get("placement_strategy")
    if (
        strategy is not None
        and strategy not in ("spread", "cluster")
        and sorted(str(strategy)) != ["D", "P", "T"]
    ):
        yield f"placement_strategy is {shown(strategy)}: it is spread, cluster, or D, P and T in some order"
    for name in _POSITIVE:
        if name in given and (type(given[name]) is not int or given[name] < 1):
            yield f"{name} is {shown(given[name])}: write a whole number of at least 1"
    for name in _BOOLEAN:
        if name in given and not isinstance(given[name], bool):
            yield f"{name} is {shown(given[name])}: write true or false"
    weight = given.get("memory_weight", 0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        yield f"memory_weight is {shown(weight)}: write a number from 0 to 1"
    if given.get("ddp") is True and given.get("horovod") is True:
        yield "ddp and horovod exclude each other: leave horovod out"
    for name in ("ddp_port", "ddp_dist_backend"):
        if name in given and given.get("ddp") is not True:
            yield f"{name} needs ddp: add it, or leave {name} out"
    yield from _default_partition_faults(given)


def _default_partition_faults(given: Mapping[str, Any]) -> Iterator[str]:
    if given.get("auto_partition") is not False:
        return
    default, partitions = given.get("default_partition"), given.get("partitions", 1)
    if type(default) is not int or default < 0 or (type(partitions) is int and default >= partitions):
        yield f"default_partition is {shown(default)}: without auto_partition it is a partition, from 0 on"
