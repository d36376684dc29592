"""A save that was chosen: checked against the script, and given to each rank.

A model that is not split yet is filled at once, so that nobody reads former weights. What an optimizer keeps, several
times as much, arrives right after the split, and each rank then reads its own part only."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.checkpoint.agree import gather_faults
from weft.checkpoint.find import Found
from weft.checkpoint.index import Index
from weft.communication.serialise import Decoder
from weft.errors import CheckpointError, UsageError
from weft.torch.checkpoint import named_state
from weft.torch.checkpoint.landing import Put, fill, land
from weft.torch.checkpoint.tensor_files import ShardReader
from weft.torch.optimizer import MASTERS
from weft.torch.placed.plan import Plan
from weft.torch.session.collectives import AllRanks
from weft.torch.session.session import Session
from weft.torch.tensors import saved_values
from weft.torch.tensors.state_names import fitting
from weft.untrusted import translated

log = logging.getLogger("weft")
APART = (
    "record", "checked", "inputs", "verify", "verify_report", "heartbeat_timeout", "wait_timeout",
    "shard_optimizer_state", "offload_activations", "offload_weights", "sharded_data_parallel_degree",
    "rebalance", "min_replicas",
)  # fmt: skip
"""Settings on which no split depends."""


@dataclass(frozen=True)
class Wanted:
    """The parts of a checkpoint that the script wants back."""

    model: Any
    optimizers: Sequence[Any]
    also: Mapping[str, Any]
    strict: bool
    random_states: bool
    allow_pickle: bool | str
    states: bool = True
    """Whether the optimizers' states come back, or only their 32-bit masters and the loss scales."""


@dataclass(frozen=True)
class _States:
    """One optimizer in a checkpoint, all but its tensors.

    ``keys``: by parameter, the paths of its tensors; ``values``: what is no tensor; ``more``: what else was saved.
    """

    groups: Sequence[Mapping[str, Any]]
    values: Mapping[str, Mapping[str, Any]]
    more: Any
    keys: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class _Decoded:
    """All of a checkpoint but its tensors, read and checked, but not yet put in place.

    ``means``: for each name in the checkpoint the model's; ``exact``: whether the random states are those of this very
    place in the mesh; ``optimizers``: of each that the script wants back.
    """

    user: Any
    also: Mapping[str, Any]
    random: list[Any] | None
    exact: bool
    means: Mapping[str, str]
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]
    optimizers: Sequence[_States]
    plan: Plan | None


def restore(session: Session, save: Found, wanted: Wanted, level: str) -> Any:
    """The user's content of a save; the script's objects take their states, the model once it is split.

    Nothing is changed before everything but the tensors was read, and on every rank. ``level``: how the save was
    verified. The user's content.
    """
    index = save.index
    assert index is not None
    if "model" not in index.content:
        wanted = replace(wanted, model=None, optimizers=())
    if "optimizer" not in index.content:
        wanted = without_optimizers(session, wanted, save.folder)
    reader = ShardReader(save.folder, index, verified=level == "full")
    decoded, wrong, damage = None, [], []
    try:
        with translated(f"{save.folder} holds what weft did not write", CheckpointError, "do not use it"):
            wrong = _find_misfits(session, index, wanted)
            decoded = None if wrong else _decode(session, reader, wanted)
    except CheckpointError as error:
        damage = [str(error)]
    damage = gather_faults(AllRanks(session), damage)
    if damage:
        raise CheckpointError("; ".join(damage))
    wrong = gather_faults(AllRanks(session), wrong)
    if wrong:
        raise UsageError(f"{save.folder} does not fit this script: {'; '.join(wrong)}")
    assert decoded is not None
    saved = [*zip(wanted.optimizers, decoded.optimizers, strict=True)]
    with ExitStack() as stack:
        stack.enter_context(named_state.also_loaded(wanted.also, decoded.also))
        for optimizer, states in saved if wanted.states else []:
            stack.enter_context(named_state.groups_loaded(optimizer, states.groups))
        if wanted.model is not None:
            land(
                wanted.model,
                lambda: _put_weights(session, reader, wanted.model, decoded),
                {
                    optimizer: partial(_read_states, reader, wanted.model, optimizer, states)
                    for optimizer, states in saved
                },
            )
            if decoded.plan is not None:
                wanted.model.resumed_plan = decoded.plan
    if decoded.random is not None:
        named_state.load_random(session, decoded.random, decoded.exact)
    return decoded.user


def without_optimizers(session: Session, wanted: Wanted, folder: Path) -> Wanted:
    """The wishes without optimizers, for a save that has no state of one; a warning if it was wished."""
    if wanted.optimizers and wanted.states and session.rank == 0:
        log.warning(
            "%s has no state of an optimizer, which begins anew: pass load_optimizer=False if you want that",
            folder,
        )
    return replace(wanted, optimizers=())


def _find_misfits(session: Session, index: Index, wanted: Wanted) -> list[str]:
    """Faults of a save that does not fit the script."""
    content, saved = index.content, model_names(index)
    if "framework" in content:  # what weft.torch writes has no such section
        return [f"it was saved by weft.{content['framework']}: resume it there"]
    means = fitting(saved, named_state.state_names(wanted.model))
    wrong: list[str] = []
    if wanted.model is not None:
        names = {means[name]: shape for name, shape in saved.items()}
        wrong += named_state.check_model(wanted.model, names, wanted.strict)
        sections = _sections(content)
        if wanted.optimizers and len(sections) != len(wanted.optimizers):
            wrong.append(f"{len(sections)} optimizers were saved, the script has {len(wanted.optimizers)}")
        for optimizer, section in zip(wanted.optimizers, sections, strict=False):
            wrong += named_state.check_optimizer(
                wanted.model, optimizer, _rename_parameters(content[section], means)
            )
    mine, _ = named_state.find_rank_content(session, content["ranks"])
    return wrong + named_state.check_also(wanted.also, None if mine is None else mine["also"])


def _decode(session: Session, reader: ShardReader, wanted: Wanted) -> _Decoded:
    """Everything in a save but the tensors; some error if the save is not as weft writes it."""
    content, saved = reader.index.content, model_names(reader.index)
    decoder = saved_values.decoder(reader.read, wanted.allow_pickle)
    means = fitting(saved, named_state.state_names(wanted.model))
    mine, exact = named_state.find_rank_content(session, content["ranks"])
    random = None if mine is None or not wanted.random_states else mine["random"]
    return _Decoded(
        user=decoder.decode(content.get("user")),
        also={} if mine is None else {name: decoder.decode(mine["also"][name]) for name in wanted.also},
        random=None if random is None else named_state.read_random_states(session, random, decoder),
        exact=exact,
        means=means,
        aliases=_aliases(reader.index),
        extra={} if wanted.model is None else _decode_dict(decoder, content["extra"]),
        optimizers=[
            _decode_states(reader.index, section, decoder, means, wanted.states)
            for section in _sections(content)[: len(wanted.optimizers)]
        ],
        plan=None if wanted.model is None else _find_plan(session, wanted.model, content, saved.keys()),
    )


def _sections(content: Mapping[str, Any]) -> list[str]:
    """The names under which a save has optimizers, in their order."""
    names = map(named_state.section_of, itertools.count())
    return list(itertools.takewhile(content.__contains__, names))


def _decode_states(
    index: Index, section: str, decoder: Decoder, means: Mapping[str, str], states: bool
) -> _States:
    values = index.content[f"{section}_values"] if states else {}
    return _States(
        groups=[_decode_dict(decoder, group["values"]) for group in index.content[section]["groups"]],
        values={means.get(name, name): _decode_dict(decoder, value) for name, value in values.items()},
        more=decoder.decode(index.content[section].get("more")),
        keys=_find_optimizer_paths(index, section, means, states),
    )


def _decode_dict(decoder: Decoder, saved: Any) -> dict[str, Any]:
    value = decoder.decode(saved)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} stands in the place of a dict")
    return value


def _find_optimizer_paths(
    index: Index, section: str, means: Mapping[str, str], states: bool
) -> dict[str, dict[str, str]]:
    keys: dict[str, dict[str, str]] = {}
    for path in index.tensors:
        if path.startswith(f"{section}/"):
            name, _, key = path.removeprefix(f"{section}/").rpartition("/")
            if states or key == MASTERS:
                keys.setdefault(means.get(name, name), {})[key] = path
    return keys


def _rename_parameters(saved: Mapping[str, Any], means: Mapping[str, str]) -> dict[str, Any]:
    """The saved content of an optimizer, with the model's names for the parameters."""
    groups = [
        {**group, "params": [means.get(name, name) for name in group["params"]]} for group in saved["groups"]
    ]
    return {**saved, "groups": groups}


def model_names(index: Index) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors in a save by their names, further names of tied tensors too."""
    names = {
        path.removeprefix("model/"): entry.shape
        for path, entry in index.tensors.items()
        if path.startswith("model/")
    }
    return names | {alias: names[first] for alias, first in _aliases(index).items()}


def _aliases(index: Index) -> Mapping[str, str]:
    """The first name of a tied tensor, by each of its further names."""
    found: Mapping[str, str] = index.content.get("model", {}).get("aliases", {})
    return found


def _find_plan(
    session: Session, model: Any, content: Mapping[str, Any], saved: Collection[str]
) -> Plan | None:
    """The plan of the split in a checkpoint, if this job is to have the same split, else None.

    The settings must ask for the same kind of split, and the model have exactly the tensors that were saved.
    """
    text = content.get("model", {}).get("plan")
    # an older checkpoint lacks newer settings
    known = {each.name: each.default for each in fields(session.settings)} | content["settings"]
    before = {name: value for name, value in known.items() if name not in APART}
    asked = _as_decided(split_settings(session), before, text)
    same = before == asked and saved == named_state.state_names(model)
    if text is None or model.partitioned or not same or not session.settings.auto_partition:
        return None
    plan = Plan.from_json(text)
    plan.check(session.settings.partitions)
    here = {name for name, _ in model.module.named_modules()}
    return plan if plan.modules() <= here else None


def _as_decided(asked: dict[str, Any], before: dict[str, Any], text: str | None) -> dict[str, Any]:
    """The settings that this job asks for; what they leave open is as the checkpoint's job has decided it."""
    if asked["optimize"] == "auto":
        asked |= {name: before.get(name) for name in ("optimize", "memory_weight")}
    if asked["microbatches"] == "auto" and text is not None and Plan.from_json(text).microbatches:
        asked["microbatches"] = before.get("microbatches")
    return asked


def split_settings(session: Session) -> dict[str, Any]:
    """The settings on which a split depends."""
    kept = json.loads(session.settings.to_json())
    return {name: value for name, value in kept.items() if name not in APART}


class _Model:
    """The tensors of a checkpoint by the names that the model has for them."""

    def __init__(self, reader: ShardReader, decoded: _Decoded) -> None:
        self._reader = reader
        self._aliases = decoded.aliases
        self.given = {name: saved for saved, name in decoded.means.items()}

    def read(self, name: str) -> Tensor:
        return self._reader.read(self._path(name))

    def check(self, name: str) -> None:
        self._reader.check(self._path(name))

    def _path(self, name: str) -> str:
        saved = self.given[name]
        return f"model/{self._aliases.get(saved, saved)}"


def _put_weights(session: Session, reader: ShardReader, model: Any, decoded: _Decoded) -> None:
    source = _Model(reader, decoded)
    fill(session, model, source.given, source)
    named_state.load_extra(session, model, decoded.extra)
    log.info("rank %d read %d bytes of %s", session.rank, reader.bytes_read, reader.folder)
    reader.close()


def _read_states(reader: ShardReader, model: Any, optimizer: Any, states: _States) -> Put:
    """Read what an optimizer is to keep, and try it; what puts it there."""
    state = named_state.read_optimizer_state(model, optimizer, states.keys, states.values, reader.read)
    reader.close()
    named_state.try_state(optimizer, state)
    return lambda: named_state.load_optimizer(optimizer, state, states.more)
