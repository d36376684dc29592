"""The settings of the original: which mean one of weft's, which are taken over, which change nothing here.

Where from, the later winning: the dict that the script gives to ``init``, ``SM_HP_MP_PARAMETERS``, then what weft's own
launch says (``WEFT_CONFIG``, ``weft run --config`` and ``--set``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weft.compat.variables import DEFAULTS, PARAMETERS
from weft.config import TP_DEGREES, Settings, written
from weft.errors import ConfigError, FormatError, warn
from weft.untrusted import parse_json, read_text, shown, shown_text

ORIGINAL = {"1f1b": "interleaved", "gpipe": "simple"}
"""The original's names of the schedules that it has."""
ALIASES = {"pipeline_parallel_degree": "partitions"}

OWN = {setting.name for setting in fields(Settings)}

KEPT: dict[str, Any] = {
    "fp16": False, "bf16": False, "fp16_params": False,
    "activation_loading_horizon": 4, "prescaled_batch": False, "skip_tracing": False,
    "sdp_gradient_clipping": 1.0, "horovod": False, "deterministic_server": False,
    "delayed_parameter_initialization": False,
}  # fmt: skip
"""Settings beside weft's own that ``smp.state.cfg`` shows, with their defaults."""

IGNORED = {
    "activation_loading_horizon": "an offloaded activation is loaded when the backward pass needs it",
    "checkpoint_attentions": "call set_activation_checkpointing on the attention modules",
    "ddp_dist_backend": "PyTorch's own backends are used",
    "ddp_port": "the ranks find a port by themselves",
    "delayed_parameter_initialization": "use delay_param_initialization()",
    "deterministic_server": "the order is always the same on all ranks",
    "fast_mode": "there is no server whose messages could be saved",
    "fork": "there is no server to fork",
    "load_partition": "give the partition in the script, see set_partition",
    "partition_file": "give the partition in the script, see set_partition",
    "sdp_hierarchical_allgather": "PyTorch's FSDP2 gathers, in one step",
    "sdp_max_live_parameters": "one block's parameters are whole at a time",
    "sdp_param_persistence_threshold": "small parameters are shared too",
    "sdp_reduce_bucket_size": "gradients of one block are reduced at a time",
    "skip_tracing": "the first step is always traced",
    "static_mode": "the order is always static",
    "tensor_parallel_seed": "each part of a split tensor draws from a stream of its own anyway",
    "xla": "call tf.config.optimizer.set_jit(True)",
    "_fp32_grad_accumulation": "gradients have their parameters' dtype",
    "_match_weights": "it is for tests of the original",
}
"""Settings that are accepted and change nothing, with the reason."""


@dataclass
class Parameters:
    """The parameters that a script and its launch asked for. ``own``: weft's settings; ``kept``: the others of
    :data:`KEPT`.
    """

    own: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=lambda: dict(KEPT))


def read(given: Mapping[str, Any], environ: Mapping[str, str]) -> Parameters:
    """The settings from the script's dict and the environment.

    Raises :class:`ConfigError` for what cannot be done; warns of settings that nobody knows.
    """
    launch = canonical(_launched(environ), PARAMETERS)
    script = canonical(given, "the dict given to init")
    merged = {**launch, **script} if environ.get(DEFAULTS) else {**script, **launch}
    if environ.get(DEFAULTS) and "partitions" not in script and type(launch.get("partitions")) is int:
        merged["partitions"] = _left_for_partitions(launch["partitions"], script, written(environ))
    if merged.get("pipeline") == "_only_forward":
        merged["pipeline"] = "simple"
    unknown = sorted(name for name in merged if name not in OWN and name not in KEPT and name not in IGNORED)
    if unknown:
        warn(
            f"unknown settings are ignored: {', '.join(unknown)}; docs/migration.md lists the known ones",
        )
    _refuse(merged)
    return Parameters(
        {name: value for name, value in merged.items() if name in OWN},
        {**KEPT, **{name: value for name, value in merged.items() if name in KEPT}},
    )


def inputs_of(parameters: Parameters) -> str:
    """Whose batch a step gets, as weft's setting says it: those of all ranks that split tensors, unless
    ``prescaled_batch`` says that they read the same."""
    tensors, sequences = (
        parameters.own.get(name, 1) for name in ("tensor_parallel_degree", "context_parallel_degree")
    )
    if isinstance(sequences, int) and sequences > 1:
        return "equal"
    if not isinstance(tensors, int) or tensors <= 1:
        return "any"
    return "equal" if parameters.kept["prescaled_batch"] else "per_rank"


def _left_for_partitions(ranks: int, script: Mapping[str, Any], launched: Collection[str]) -> int:
    """The number of partitions where nobody says one: all ranks, but for those that the script needs to split
    tensors and sequences. One partition where replicas share parameters.

    ``launched``: settings by which the launch has done the same.
    """
    if script.get("sharded_data_parallel_degree", 1) not in (0, 1):
        return 1
    for name in TP_DEGREES:
        degree = script.get(name)
        if name not in launched and type(degree) is int and degree > 1:
            ranks //= degree
    return max(1, ranks)


def canonical(source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``source`` with the other names of settings replaced."""
    result: dict[str, Any] = {}
    for key, value in source.items():
        name = ALIASES.get(str(key), str(key))
        if name in result and result[name] != value:
            raise ConfigError(
                f'"{name}" and its other name ({where}) have the values {shown(result[name])} and '
                f"{shown(value)}: leave one out"
            )
        result[name] = value
    return result


def _launched(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(PARAMETERS, "").strip()
    if not text:
        return {}
    try:
        if not text.startswith(("{", "[", '"')) and os.path.exists(text):
            text = read_text(text)
        content = parse_json(text, f"{PARAMETERS} is not JSON")
    except FormatError as error:
        raise ConfigError(f'{error}; write it as {{"partitions": 2}}') from error
    if not isinstance(content, dict):
        raise ConfigError(
            f'{PARAMETERS} holds {shown_text(text)}: write an object, for example {{"partitions": 2}}'
        )
    return content


def _refuse(merged: Mapping[str, Any]) -> None:
    faults = []
    for name in ("fp16", "bf16"):
        if not isinstance(merged.get(name, False), bool):
            faults.append(f'{name} is {shown(merged[name])}: write "{name}": true or false')
    if merged.get("fp16") is True and merged.get("bf16") is True:
        faults.append("fp16 and bf16 are both on: leave one out")
    if merged.get("horovod") is True and merged.get("ddp") is True:
        faults.append("ddp and horovod exclude each other: leave horovod out")
    if faults:
        raise ConfigError("; ".join(faults))


class Config:
    """``smp.state.cfg``: every setting as an attribute."""

    def __init__(self, parameters: Parameters, settings: Settings) -> None:
        self.__dict__.update(parameters.kept)
        self.__dict__.update({setting.name: getattr(settings, setting.name) for setting in fields(settings)})
        self.pipeline = ORIGINAL.get(settings.pipeline, settings.pipeline)
        self.pipeline_parallel_degree = settings.partitions

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no setting {name}")

    def __repr__(self) -> str:
        return f"Config({self.__dict__})"
