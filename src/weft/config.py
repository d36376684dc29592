"""Every setting of weft: its type, its default, what it allows and what it means.

Settings come from the argument of `init`, from `WEFT_CONFIG` (the launch configuration, which wins over the
argument) and from `WEFT_SET` (single values given to `weft run --set`, which win over both), key by
key. This module is handed the environment and reads none itself. All faults are found before it raises.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from weft.checks import Check, Choice, Flag, Number, Speeds, Steps, Text, Whole, WholeOrWord
from weft.errors import ConfigError, FormatError, UsageError
from weft.schedule.table import KINDS, SECOND_NAMES, having, named
from weft.untrusted import MOST_RANKS, parse_json, read_text, shown, shown_path, shown_text

ALIASES = {"pipeline_parallel_degree": "partitions"}
"""Other names that existing scripts use for a setting."""
GROUP = "offload"
"""Settings that begin so may be written as one: `"offload": {"optimizer": true}` for `"offload_optimizer": true`."""

PLACEMENTS = {"cluster": "DPT", "spread": "TPD"} | {
    letters: letters for letters in map("".join, itertools.permutations("DPT"))
}
"""Placement strategies: the axes D (`rdp`), P (`pp`) and T (`tp`) from the slowest to the fastest."""


def _setting(default: object, check: Check, meaning: str, derived: str | None = None) -> Any:
    """A field; `derived` says in words what a default of None becomes."""
    return field(default=default, metadata={"check": check, "meaning": meaning, "derived": derived})


PIPELINES = tuple(KINDS)
"""The schedules that a job may ask for."""


class Schedule(Choice):
    """The name of a schedule, or one of its second names."""

    def __init__(self) -> None:
        super().__init__(tuple(KINDS), SECOND_NAMES)

    def word_of(self, value: str) -> str:
        return named(value)


@dataclass(frozen=True)
class Settings:
    """The settings of a job, checked and complete: no value is left open.

    >>> settings = Settings(partitions=2, optimize="speed")
    >>> settings.active_microbatches, settings.memory_weight
    (4, 0.2)
    """

    partitions: int = _setting(1, Whole(1), "into how many partitions the model is split")
    microbatches: int | Literal["auto"] = _setting(
        1,
        WholeOrWord(1, "auto"),
        "into how many microbatches a mini-batch is cut; auto (with PyTorch): as the first step is measured to be the "
        "quickest",
    )
    pipeline: str = _setting("1f1b", Schedule(), "the schedule, see docs/schedules.md")
    devices: str = _setting(
        "alike",
        Speeds(("alike", "measured")),
        "how fast the ranks of the partitions are beside each other, for a split by time (with PyTorch). alike; "
        'measured: the first step measures it; numbers by partition: "1, 0.5"',
    )
    rebalance: bool = _setting(
        False,
        Flag(),
        "units move to other ranks between two steps where a rank has become slower or faster (with PyTorch), see "
        "docs/splitting.md#ranks-that-become-slower",
    )
    compile: bool = _setting(
        False,
        Flag(),
        "after the split each rank compiles its units by torch.compile (with PyTorch), see "
        "docs/splitting.md#compiled-units",
    )
    executor: Literal["graph", "eager"] = _setting(
        "graph", Choice(("graph", "eager")), "with TensorFlow: how a step runs, as a graph or call by call"
    )
    memory_limit: float = _setting(
        0.0,
        Number(0),
        "GiB that a rank may take, for `auto` and `list`; 0: what its GPU has, any amount on a CPU",
    )
    schedule_file: str = _setting("", Text(), "the CSV file of `file`; the first rank reads it")
    chunks: int = _setting(2, Whole(2), "how many stages a rank has with `interleaved_1f1b` and `looped_bfs`")
    optimize: Literal["auto", "memory", "speed"] = _setting(
        "auto",
        Choice(("auto", "memory", "speed")),
        "what the automatic split balances first; auto: speed, unless that needs more than 70 % of a rank's memory",
    )
    memory_weight: float = _setting(
        None,
        Number(0, 1),
        "what the automatic split balances: 0 is time, 1 is memory, between them a mixture",
        "what optimize and pipeline say",
    )
    contiguous: bool = _setting(
        False,
        Flag(),
        "TensorFlow only: each partition is a contiguous range of layers, although another split may be quicker",
    )
    auto_partition: bool = _setting(True, Flag(), "split the model by itself; false: as the script says")
    default_partition: int = _setting(0, Whole(0), "the partition of what the script did not place")
    active_microbatches: int = _setting(
        None, Whole(1), "how many microbatches a rank may hold at once", "partitions + 2"
    )
    placement_strategy: str = _setting(
        "cluster",
        Choice(tuple(PLACEMENTS)),
        "which ranks make one pipeline; the right-most letter varies fastest",
    )
    ddp: bool = _setting(
        False,
        Flag(),
        "accepted for scripts that set it, changes nothing: more ranks than partitions make replicas",
    )
    all_reduce: str = _setting(
        "auto",
        Choice(("auto", "direct", "shared", "hierarchical")),
        "how gradients are all-reduced over replicas, see docs/data-parallel.md#algorithms-and-compression",
    )
    compression: str = _setting(
        "", Text(), 'how gradients are compressed between replicas ("int8", say); empty: not at all'
    )
    shard_optimizer_state: bool = _setting(
        False, Flag(), "each replica keeps and updates a shard of the optimizer states (ZeRO-1)"
    )
    min_replicas: int = _setting(
        0,
        Whole(0),
        "with so many replicas left the job goes on without one that is lost, which is started again and joins (with "
        "PyTorch, on CPUs of one machine), see docs/data-parallel.md#replicas-that-are-lost; 0: a lost rank ends the "
        "job",
    )
    offload_activations: bool = _setting(
        False,
        Flag(),
        "activations of microbatches that wait for their backward pass wait in host memory, see "
        "docs/large-models.md#offload",
    )
    offload_optimizer: bool = _setting(
        False, Flag(), "the optimizer's states wait in host memory, see docs/large-models.md#offload"
    )
    offload_weights: bool = _setting(
        False,
        Flag(),
        "weights wait in host memory but for the layers that run (with PyTorch), see docs/large-models.md#offload",
    )
    trainer_tokens: str = _setting(
        "",
        Text(),
        "the entry of a trainer's batches with the mask of padded rows (`attention_mask`, say): its training steps are "
        "cut by tokens, see docs/what-a-step-may-do.md#batches-whose-rows-differ-in-length; empty: by rows",
    )
    chunked_loss: Literal["auto", "on", "off"] = _setting(
        "auto",
        Choice(("auto", "on", "off")),
        "the logits of a language model's head are computed in chunks where the cross entropy needs them. auto: where "
        "those of a microbatch would take 256 MiB, see docs/large-models.md#logits",
    )
    sharded_data_parallel_degree: int = _setting(
        1, Whole(1), "over how many replicas parameters, gradients and optimizer states are sharded (ZeRO-3)"
    )
    sharded_parameters_gathered: Literal["step", "microbatch"] = _setting(
        "step",
        Choice(("step", "microbatch")),
        "when sharded parameters are all-gathered, beside partitions or tensor parallelism. step: once a step; "
        "microbatch: per layer and microbatch",
    )
    tensor_parallel_degree: int = _setting(
        1, Whole(1), "over how many ranks the weights of a layer are sharded, see docs/tensor-parallel.md"
    )
    context_parallel_degree: int = _setting(
        1, Whole(1), "over how many ranks long sequences are sharded, see docs/context-parallel.md"
    )
    context_parallel_attention: Literal["auto", "all_gather", "all_to_all"] = _setting(
        "auto",
        Choice(("auto", "all_gather", "all_to_all")),
        "how ranks that share sequences compute attention. all_gather: queries of their own positions, keys and values "
        "of all; all_to_all: heads of their own, where the degree divides heads and positions; auto: all_to_all, "
        "unless that sends much more",
    )
    sequence_parallel: bool = _setting(
        False,
        Flag(),
        "between sharded layers, each rank has some of the tokens only, see docs/tensor-parallel.md",
    )
    experts: Literal["auto", "expert_parallel", "expert_tensor_parallel"] = _setting(
        "auto",
        Choice(
            ("auto", "expert_parallel", "expert_tensor_parallel"),
            {"ranks": "expert_parallel", "parts": "expert_tensor_parallel"},
        ),
        "how tensor-parallel ranks hold the experts of a mixture. expert_parallel: each has some of them; "
        "expert_tensor_parallel: each has a shard of every one; auto: the first for experts that are modules, the "
        "second for those that are one weight",
    )
    expert_parallel_degree: int = _setting(
        1,
        Whole(1),
        "over how many data-parallel replicas the experts of a mixture are shared; tokens are sent to theirs and back, "
        "see docs/data-parallel.md#experts-over-replicas",
    )
    heartbeat_timeout: float = _setting(
        30.0, Number(0, open_below=True), "seconds without a sign of life after which a rank counts as frozen"
    )
    wait_timeout: float = _setting(
        600.0,
        Number(0, open_below=True),
        "seconds a rank waits for another one's tensor before the job is ended",
    )
    deterministic: bool = _setting(
        False,
        Flag(),
        "two runs give the same bits: nothing is chosen by measured times, and sums have one order, see "
        "docs/settings.md#deterministic",
    )
    checked: Literal["first", "always"] = _setting(
        "first",
        Choice(("first", "always")),
        "compare all values that ranks are fed in the first step, or in every one (shapes: always)",
    )
    inputs: Literal["equal", "first", "any", "per_rank"] = _setting(
        "equal",
        Choice(("equal", "first", "any", "per_rank"), {"apart": "per_rank"}),
        "whose batch a step gets. equal: each rank its own, other values are an error; first: the first rank's; any: "
        "the first rank's, if batches differ in step 1; per_rank: each tensor-parallel rank reads its own samples, "
        "and a step trains on all of them",
    )
    verify: Literal["losses", "gradients", "off"] = _setting(
        "losses",
        Choice(("losses", "gradients", "off")),
        "what of the first step is compared with one process, see docs/assumptions.md",
    )
    verify_report: str = _setting(
        "",
        Text(),
        "a file for `weft verify`: three steps are compared, what they differ by is written there, and the job ends",
    )
    log_dir: str = _setting("weft-log", Text(), "a folder for the values that the script gives to weft.log")
    tensorboard: str = _setting(
        "",
        Text(),
        "a folder for the same values as TensorBoard reads them; empty: log_dir, if it is installed",
    )
    record: str = _setting("", Text(), "a folder where each rank records what it runs when; empty: nowhere")
    record_steps: str = _setting(
        "all",
        Steps(),
        "of which steps a recording keeps the spans, see docs/timeline.md; what each step took it keeps",
    )

    def __post_init__(self) -> None:
        given = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        _raise(_value_faults(given, {}))
        for name, value in _complete(given).items():
            object.__setattr__(self, name, value)

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each partition's ranks, the fastest has 1; empty where all are alike, or nobody knows yet.

        >>> Settings(partitions=2, devices="2, 1").speeds
        (1.0, 0.5)
        """
        if self.devices in ("alike", "measured"):
            return ()
        found = [float(part) for part in self.devices.split(",")]
        return tuple(speed / max(found) for speed in found) if len(set(found)) > 1 else ()

    @property
    def tp_size(self) -> int:
        """The number of ranks on axis `tp`: they split weights, or share sequences."""
        return self.tensor_parallel_degree * self.context_parallel_degree

    @property
    def replica_shards(self) -> int:
        """Over how many replicas parameters are sharded, or experts shared; 1 where each replica has all of them."""
        return max(self.sharded_data_parallel_degree, self.expert_parallel_degree)

    @property
    def offloads(self) -> bool:
        """True if something waits in host memory."""
        return self.offload_activations or self.offload_optimizer or self.offload_weights

    @property
    def microbatch_count(self) -> int:
        """Into how many microbatches a mini-batch is cut.

        Raises:
            UsageError: That is left open, and no step has decided it.
        """
        if isinstance(self.microbatches, int):
            return self.microbatches
        raise UsageError('microbatches is "auto": the first step decides how many there are')

    def to_json(self) -> str:
        """Stable text: equal settings give equal text on every rank."""
        return json.dumps(asdict(self), sort_keys=True)

    def digest(self) -> str:
        """A short fingerprint of `to_json`, to compare ranks with."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


class Row(NamedTuple):
    """A setting as the documentation shows it."""

    name: str
    type: str
    default: str
    meaning: str


def describe() -> list[Row]:
    """All settings, in the order of `Settings`."""
    return [
        Row(
            setting.name,
            setting.metadata["check"].name,
            setting.metadata["derived"] or json.dumps(setting.default),
            setting.metadata["meaning"],
        )
        for setting in fields(Settings)
    ]


def resolve(
    argument: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    world_size: int | None = None,
    options: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of a job from all their sources.

    Args:
        argument: What the script gave to `init`.
        environ: The environment; its `WEFT_CONFIG` (JSON text, or the path of a JSON file) wins over the
            argument key by key, and its `WEFT_SET` (JSON text) over both.
        world_size: How many processes the job has, if known; the partitions must divide it.
        options: By the variables that options of the command line have become, these: errors name them.

    >>> resolve({"partitions": 2}, {"WEFT_CONFIG": '{"partitions": 4}'}).partitions
    4
    """
    environ = environ or {}
    faults: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    config, some = ((options or {}).get(name, name) for name in ("WEFT_CONFIG", "WEFT_SET"))
    sources = (
        ("the argument of init", _from_argument(argument, faults)),
        (config, _from_text(config, environ.get("WEFT_CONFIG", ""), faults)),
        (some, _from_text(some, environ.get("WEFT_SET", ""), faults, may_be_path=False)),
    )
    for origin, source in sources:
        for name, value in _canonical(source, origin, faults).items():
            values[name], origins[name] = value, origin
    faults += _value_faults(values, origins)
    if not faults and world_size is not None:
        faults += _world_faults(values.get("partitions", 1), world_size)
        degrees = {name: values[name] for name in TP_DEGREES if values.get(name, 1) > 1}
        faults += _tensor_faults(values.get("partitions", 1), degrees, world_size)
        for name in ("sharded_data_parallel_degree", "expert_parallel_degree"):
            faults += _sharers_faults(
                name, values.get("partitions", 1), degrees, values.get(name, 1), world_size
            )
    _raise(faults)
    return Settings(**values)


def with_named(argument: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings that `init` was given as a dict and by name: `init({"partitions": 2}, microbatches=4)`.

    Raises:
        ConfigError: A setting is given twice, with two values.
    """
    if not named or not (argument is None or isinstance(argument, Mapping)):
        return argument
    twice = [
        name for name, value in named.items() if name in (argument or {}) and (argument or {})[name] != value
    ]
    _raise([f"{name} is given to init twice, with two values: leave one of them out" for name in twice])
    return {**(argument or {}), **named}


def with_those_of(environ: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the environment's `WEFT_SET`, and `values` in place of these.

    >>> with_those_of({"WEFT_SET": '{"partitions": 4, "microbatches": 8}'}, {"partitions": 2})
    {'partitions': 2, 'microbatches': 8}

    Raises:
        ConfigError: `WEFT_SET` is no object.
    """
    faults: list[str] = []
    before = _from_text("WEFT_SET", environ.get("WEFT_SET", ""), faults, may_be_path=False)
    _raise(faults)
    return {**before, **values}


def written(environ: Mapping[str, str]) -> set[str]:
    """The names of the settings that the launch gives, by `WEFT_CONFIG` or `WEFT_SET`, right or wrong.

    >>> written({"WEFT_SET": '{"partitions": 4}'})
    {'partitions'}
    """
    faults: list[str] = []
    found: set[str] = set()
    for name in ("WEFT_CONFIG", "WEFT_SET"):
        source = _from_text(name, environ.get(name, ""), faults, may_be_path=name == "WEFT_CONFIG")
        found |= _canonical(source, name, faults).keys()
    return found


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`key=value` as given to `--set`: the value is JSON, or else the text itself.

    >>> parse_assignments(["partitions=2", "pipeline=gpipe", "ddp=true"])
    {'partitions': 2, 'pipeline': 'gpipe', 'ddp': True}
    """
    result: dict[str, Any] = {}
    faults = []
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            faults.append(
                f'"{shown_text(text)}" sets nothing: write it as key=value, for example partitions=2'
            )
            continue
        try:
            result[key.strip()] = parse_json(value)
        except FormatError:
            result[key.strip()] = value
    _raise(faults)
    return result


def _from_argument(argument: Mapping[str, Any] | None, faults: list[str]) -> Mapping[str, Any]:
    if argument is None or isinstance(argument, Mapping):
        return argument or {}
    faults.append(
        f"the argument of init is of type {type(argument).__name__}: "
        'write a dict, for example {"partitions": 2}'
    )
    return {}


def _from_text(origin: str, text: str, faults: list[str], may_be_path: bool = True) -> Mapping[str, Any]:
    """The object in a variable, which holds JSON text or the path of a file with it."""
    text = text.strip()
    if not text:
        return {}
    where = origin
    try:
        if may_be_path and not text.startswith(("{", "[", '"')):
            where = f'{origin} (the file "{shown_path(text)}")'
            text = read_text(text)
    except FormatError as error:
        faults.append(f"{origin}: {error}; give JSON text or the path of a JSON file")
        return {}
    try:
        value = parse_json(text, f"{where} is not JSON")
    except FormatError as error:
        faults.append(f'{error}; write it as {{"partitions": 2}}')
        return {}
    if isinstance(value, dict):
        return value
    faults.append(f'{where} holds {shown(value)}: write an object, for example {{"partitions": 2}}')
    return {}


def _canonical(source: Mapping[str, Any], origin: str, faults: list[str]) -> dict[str, Any]:
    """`source` with each setting under its own name, and unknown keys reported."""
    known = [setting.name for setting in fields(Settings)]
    result: dict[str, Any] = {}
    first: dict[str, str] = {}
    for key, name, value in _named(source):
        if name not in known:
            written = key if isinstance(key, str) else shown(key)
            close = difflib.get_close_matches(written, [*known, *ALIASES], n=1)
            if written.startswith(GROUP):
                close = ['" or "'.join(each for each in known if each.startswith(GROUP))]
            hint = f'did you mean "{close[0]}"?' if close else f"the settings are {', '.join(known)}"
            faults.append(f'there is no setting "{shown_text(written)}" ({origin}): {hint}')
        elif name in result and result[name] != value:
            faults.append(
                f'"{first[name]}" and "{key}" ({origin}) are the same setting but have the values '
                f"{shown(result[name])} and {shown(value)}: leave one out"
            )
        else:
            result[name] = value
            first.setdefault(name, key)
    return result


def _named(source: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Each value of `source`, with its key and the name of its setting; a group gives one for each of its own."""
    for key, value in source.items():
        if key == GROUP and isinstance(value, Mapping):
            yield from ((f"{key}.{each}", f"{key}_{each}", own) for each, own in value.items())
        else:
            name = key.replace(".", "_") if isinstance(key, str) and key.startswith(f"{GROUP}.") else key
            yield key, ALIASES.get(name, name), value


def _value_faults(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Faults of the values, each for itself and together."""
    faults = []
    for setting in fields(Settings):
        check: Check = setting.metadata["check"]
        value = values.get(setting.name, setting.default)
        if check.accepts(value) or (value is None and setting.default is None):
            continue
        origin = f" ({origins[setting.name]})" if setting.name in origins else ""
        faults.append(
            f"{setting.name} is {shown(value)}{origin}, it must be {check}: {_advice(setting, value)}"
        )
    if faults:
        return faults
    complete = _complete(values)
    left_open = complete["microbatches"] == "auto"
    if left_open and complete["pipeline"] == "file":
        faults.append(
            'microbatches is "auto", but pipeline is "file", and the file is for one number of microbatches: write '
            'that number, or another "pipeline"'
        )
    if left_open and complete["min_replicas"]:
        faults.append(
            'microbatches is "auto", which each replica would decide for itself, but min_replicas is '
            f'{complete["min_replicas"]}: write "microbatches": 4, say, or "min_replicas": 0'
        )
    faults += _timed_faults(complete)
    faults += _device_faults(complete)
    if complete["compile"] and complete["partitions"] == 1:
        faults.append(
            'compile is true, but there is one partition, so nothing is split: write "partitions": 2, say, or compile '
            "the model yourself, model.compile()"
        )
    if complete["sequence_parallel"] and complete["tensor_parallel_degree"] == 1:
        faults.append(
            "sequence_parallel is true, but tensor_parallel_degree is 1, so no layer is split: write "
            '"tensor_parallel_degree": 2, say, or leave sequence_parallel out'
        )
    if complete["default_partition"] >= complete["partitions"]:
        faults.append(
            f"default_partition is {complete['default_partition']}, but {complete['partitions']} partitions "
            f"are counted from 0: write a number up to {complete['partitions'] - 1}"
        )
    if complete["sharded_parameters_gathered"] == "microbatch" and complete["verify"] == "gradients":
        faults.append(
            'verify is "gradients", which compares whole ones, but sharded_parameters_gathered is "microbatch", with '
            'which no rank has any: write "verify": "losses", or "sharded_parameters_gathered": "step"'
        )
    faults += _degree_faults(complete)
    for chief, others in _ONLY_WITH.items():
        value, without = complete[chief], Settings.__dataclass_fields__[chief].default
        if value != without:
            faults += [
                f"{name} is {json.dumps(complete[name])}, which does not fit {chief} {json.dumps(value)}: write "
                f'"{name}": {" or ".join(map(json.dumps, fitting))}, or "{chief}": {json.dumps(without)}'
                for name, fitting in others.items()
                if complete[name] not in fitting
            ]
    return faults


def _degree_faults(complete: Mapping[str, Any]) -> list[str]:
    """Faults of the degrees over which ranks share weights, experts or sequences."""
    faults = []
    if complete["expert_parallel_degree"] > 1 and complete["verify"] == "gradients":
        faults.append(
            'verify is "gradients", which compares whole ones, but with expert_parallel_degree '
            f'{complete["expert_parallel_degree"]} each replica has some experts only: write "verify": "losses"'
        )
    degrees = sorted(complete[name] for name in ("expert_parallel_degree", "sharded_data_parallel_degree"))
    if degrees[1] % degrees[0]:
        faults.append(
            f"expert_parallel_degree is {complete['expert_parallel_degree']} and sharded_data_parallel_degree is "
            f"{complete['sharded_data_parallel_degree']}: write two of which one divides the other"
        )
    return faults


def _timed_faults(complete: Mapping[str, Any]) -> list[str]:
    """Faults of settings that follow measured times, where two runs are to give the same bits."""
    faults = []
    if complete["deterministic"]:
        if complete["microbatches"] == "auto":
            faults.append(
                'microbatches is "auto", which follows measured times, but deterministic is true: write '
                '"microbatches": 4, say, or leave deterministic out'
            )
        if KINDS[complete["pipeline"]].timed:
            faults.append(
                f'pipeline is "{complete["pipeline"]}", which follows measured times, but deterministic is true: '
                'write "pipeline": "1f1b", say, or leave deterministic out'
            )
    return faults


def _device_faults(complete: Mapping[str, Any]) -> list[str]:
    """Faults of the speeds of devices."""
    faults = []
    if complete["devices"] not in ("alike", "measured"):
        count = len(complete["devices"].split(","))
        if count != complete["partitions"] > 1:
            faults.append(
                f"devices has {count} numbers ({complete['devices']}) for {complete['partitions']} partitions: "
                "write one for each"
            )
    if complete["deterministic"] and complete["devices"] == "measured":
        faults.append(
            'devices is "measured", which follows measured times, but deterministic is true: write the numbers, '
            '"devices": "1, 0.5" say, or leave deterministic out'
        )
    return faults


_ONLY_WITH: dict[str, dict[str, Sequence[Any]]] = {
    "sharded_data_parallel_degree": {"shard_optimizer_state": [False], "compression": [""]},
    "tensor_parallel_degree": {"inputs": ["equal", "per_rank"]},
    "context_parallel_degree": {"inputs": ["equal", "per_rank"]},
    "compile": {
        "tensor_parallel_degree": [1], "context_parallel_degree": [1], "sharded_data_parallel_degree": [1],
        "expert_parallel_degree": [1],
    },
    "expert_parallel_degree": {"context_parallel_degree": [1]},
    "offload_weights": {
        "compile": [False], "rebalance": [False], "min_replicas": [0], "sharded_data_parallel_degree": [1],
        "expert_parallel_degree": [1],
    },
    "min_replicas": {
        "shard_optimizer_state": [False], "sharded_data_parallel_degree": [1], "tensor_parallel_degree": [1],
        "context_parallel_degree": [1], "expert_parallel_degree": [1], "compression": [""], "rebalance": [False],
        "placement_strategy": ["cluster", "DPT"], "inputs": ["equal", "first", "any"], "record": [""],
        "pipeline": having(lambda kind: not kind.measured),
    },
    "rebalance": {
        "compile": [False], "deterministic": [False], "auto_partition": [True], "compression": [""],
        "shard_optimizer_state": [False], "sharded_data_parallel_degree": [1], "tensor_parallel_degree": [1],
        "context_parallel_degree": [1], "expert_parallel_degree": [1],
        "pipeline": having(lambda kind: not kind.measured),
    },
}  # fmt: skip
"""The values that other settings must have where one of these is not as by default."""


def _advice(setting: Field[Any], value: object) -> str:
    """The value to type instead: what the text meant, if that is clear, or else the default."""
    check: Check = setting.metadata["check"]
    if setting.name == "tensor_parallel_degree" and value == "auto":
        return (
            "how many replicas read data depends on it, so it must be known before a script asks for its "
            f'share of them. weft tune finds it by trying, weft plan by formulas; then write "{setting.name}": 2, say'
        )
    meant = _meant(value.lower(), check) if isinstance(value, str) else None
    if not check.accepts(meant):
        meant = setting.default
    if meant is None:
        return f"leave it out for {setting.metadata['derived']}"
    return f'write "{setting.name}": {json.dumps(meant)}'


def _meant(text: str, check: Check) -> object:
    if isinstance(check, Choice):
        found = difflib.get_close_matches(text, [*check.words, *check.second_names], n=1)
        return check.word_of(found[0]) if found else None
    try:
        return parse_json(text)
    except FormatError:
        words = [check.word] if isinstance(check, WholeOrWord) else []
        return next(iter(difflib.get_close_matches(text, words, n=1)), None)


def _complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by name: defaults filled in, open values derived, numbers of the declared type."""
    result = {setting.name: values.get(setting.name, setting.default) for setting in fields(Settings)}
    for setting in fields(Settings):
        check: Check = setting.metadata["check"]
        if isinstance(check, Choice):
            result[setting.name] = check.word_of(result[setting.name])
        elif isinstance(check, Number) and result[setting.name] is not None:
            result[setting.name] = float(result[setting.name])
    if result["memory_weight"] is not None and result["optimize"] == "auto":
        result["optimize"] = "memory" if result["memory_weight"] >= 0.5 else "speed"
    if result["memory_weight"] is None:
        balanced = 0.8 if result["optimize"] == "memory" else 0.2
        result["memory_weight"] = 0.0 if KINDS[result["pipeline"]].timed else balanced
    if result["active_microbatches"] is None:
        result["active_microbatches"] = result["partitions"] + 2
    return result


def _world_faults(partitions: int, world_size: int) -> list[str]:
    start = f"start a multiple of {partitions} processes (weft run -n {partitions}), or "
    return _divisor_faults("partitions", partitions, world_size, start)


TP_DEGREES = ("tensor_parallel_degree", "context_parallel_degree")
"""The settings that give axis `tp` more than one rank."""


def _tensor_faults(partitions: int, degrees: Mapping[str, int], world_size: int) -> list[str]:
    """Ranks that do not make whole replicas, where partitions alone would."""
    ranks = partitions * math.prod(degrees.values())
    if world_size % ranks == 0 or world_size % partitions:
        return []
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    named = " and ".join(f"{name} is {degree}" for name, degree in degrees.items())
    whole = " or ".join(f'"{name}": 1' for name in degrees)
    return [
        f"{named} with {partitions} partition{'s' * (partitions > 1)}, which takes {ranks} "
        f"processes for a replica, but the job has {processes}: start a multiple of {ranks} processes (weft "
        f"run -n {ranks}), or write {whole}"
    ]


def _sharers_faults(
    name: str, partitions: int, degrees: Mapping[str, int], degree: int, world_size: int
) -> list[str]:
    """Replicas that a degree of sharing does not divide."""
    ranks = partitions * math.prod(degrees.values())
    if ranks == 1:
        return _divisor_faults(name, degree, world_size)
    replicas = world_size // ranks
    if world_size % ranks or replicas % degree == 0:
        return []
    divided = f"{partitions} partition{'s' * (partitions > 1)}"
    divided += "".join(f" and {other} {each}" for other, each in degrees.items())
    return [
        f"{name} is {degree}, but {world_size} processes with {divided} make "
        f"{replicas} replica{'s' * (replicas > 1)}, which cannot be divided into groups of {degree}: start a "
        f'multiple of {ranks * degree} processes (weft run -n {ranks * degree}), or write "{name}": 1'
    ]


def _divisor_faults(name: str, value: int, world_size: int, remedy: str = "") -> list[str]:
    """A setting that has to divide the number of processes; `remedy` comes before the values that do."""
    if world_size % value == 0:
        return []
    divisors = [str(n) for n in range(1, min(world_size, MOST_RANKS) + 1) if world_size % n == 0]
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    fault = f"{processes} cannot be divided into groups of {value} ({name})"
    if name == "partitions":
        fault = f"{processes} cannot be divided into pipelines of {value} partitions"
    return [f'{fault}: {remedy}write "{name}": {" or ".join(divisors)}']


def _raise(faults: list[str]) -> None:
    if len(faults) == 1:
        raise ConfigError(faults[0])
    if faults:
        listed = "".join(f"\n  {number}. {fault}" for number, fault in enumerate(faults, 1))
        raise ConfigError(f"{len(faults)} settings are wrong:{listed}")
