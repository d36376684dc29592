"""Finding a checkpoint that is whole, together; and giving each rank its part of it once the model is split."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.checkpoint.find import Found, faults, in_order, look, ownership, saves
from weft.checkpoint.index import Index
from weft.errors import CheckpointError, UsageError
from weft.torch import parts
from weft.torch.collective import broadcast_text, gather_texts
from weft.torch.content import Decoder
from weft.torch.optimizer import MASTERS
from weft.torch.plan import Plan
from weft.torch.saving import Saves, meet
from weft.torch.shard_file import ShardReader
from weft.torch.state import Session
from weft.torch.state_names import fitting

log = logging.getLogger("weft")
APART = (
    "record", "checked", "inputs", "verify", "verify_report", "heartbeat_timeout", "wait_timeout",
    "shard_optimizer_state", "offload_activations", "sharded_data_parallel_degree",
)  # fmt: skip
"""Settings on which no split depends."""


@dataclass(frozen=True)
class Wanted:
    """What the script wants back from a checkpoint."""

    model: Any
    optimizer: Any
    also: Mapping[str, Any]
    strict: bool
    random_states: bool
    allow_pickle: bool
    states: bool = True
    """Whether the optimizer's states come back, or only its 32-bit masters and the loss scale."""


def come_together(session: Session, call: str, tag: str | None) -> None:
    """Every rank has made the same call; else :class:`UsageError` that names those that did not."""
    if session.place.world_size == 1:
        return
    session.monitor.note("checkpoint", session.steps)
    try:
        meeting = Saves.of(session).meeting(f"{call}(tag={tag!r})", everybody=True)
        meet(meeting, {"call": call, "tag": tag or ""})
    finally:
        session.monitor.note("", session.steps)


def agree(session: Session, faults_here: list[str]) -> list[str]:
    """The faults that any rank found, on every rank."""
    with session.doing("resume_from_checkpoint()"):
        texts = gather_texts(json.dumps(faults_here), session.group("world"))
    return list(dict.fromkeys(fault for text in texts for fault in json.loads(text)))


def told_by_first(session: Session, make: Callable[[], Any]) -> Any:
    """What ``make`` gives on rank 0, on every rank; its error likewise."""
    said: dict[str, Any] = {}
    if session.rank == 0:
        try:
            said = {"value": make()}
        except CheckpointError as error:
            said = {"error": str(error)}
        except OSError as error:
            said = {"error": f"{error}: let this user (id {os.geteuid()}) read there"}
    with session.doing("resume_from_checkpoint()"):
        said = json.loads(broadcast_text(json.dumps(said), 0, session.group("world")))
    if "error" in said:
        raise CheckpointError(said["error"])
    return said["value"]


def choose(session: Session, root: Path, tag: str | None, level: str) -> Found:
    """The save to resume from: the first that is whole, the same on every rank.

    With a tag only that tag's saves count; if they are not whole, the error offers the newest one that is.
    """

    def candidates() -> list[list[Any]]:
        if not root.is_dir():
            raise CheckpointError(f"{root} is no folder, so there is no checkpoint to resume from")
        warning = ownership(root)
        if warning:
            log.warning("%s", warning)
        first = in_order(root, tag)
        rest = [save for save in saves(root) if tag is not None and save.tag != tag]
        return [[save.folder.name, save.tag] for save in [*first, *rest]]

    bad: list[str] = []
    names = told_by_first(session, candidates)
    for name, its_tag in names:
        save = look(root / name)
        wrong = agree(session, _faults_here(session, save, level))
        if not wrong and (tag is None or its_tag == tag):
            if bad and session.rank == 0:
                log.warning(
                    "resuming from %s, because newer checkpoints are not whole: %s", name, "; ".join(bad)
                )
            elif session.rank == 0:
                log.info("resuming from %s", save.folder)
            return save
        if not wrong:
            offer = (
                f"The newest one that is whole is {its_tag!r}: resume_from_checkpoint(path, tag={its_tag!r})"
            )
            raise CheckpointError(f"{_none(root, tag, bad)}. {offer}")
        bad += wrong
    raise CheckpointError(f"{_none(root, tag, bad)}. There is no other one that is whole in {root}")


def _faults_here(session: Session, save: Found, level: str) -> list[str]:
    """The faults of a save that this rank finds, its share of the bytes compared."""
    if save.index is None:
        return [save.fault]
    try:
        return faults(save.folder, save.index, level, (session.rank, session.place.world_size))
    except OSError as error:  # the others must hear of it
        return [f"{save.folder} cannot be read by rank {session.rank}: {error}"]


def _none(root: Path, tag: str | None, bad: list[str]) -> str:
    if bad:
        return "the checkpoint cannot be used: " + "; ".join(bad)
    return f"{root} has no checkpoint" + (f" with the tag {tag!r}" if tag is not None else "")


def restore(session: Session, save: Found, wanted: Wanted) -> Any:
    """Check that a save fits the script, take back what can be taken now, and the rest once the model is split.

    The user's content.
    """
    index = save.index
    assert index is not None
    if "model" not in index.content:
        wanted = replace(wanted, model=None, optimizer=None)
    reader = ShardReader(save.folder, index)
    decoder = Decoder(reader.read, wanted.allow_pickle)
    content = index.content
    ranks: Mapping[str, Any] = content["ranks"]
    mine, exact = parts.rank_content(session, ranks)
    saved = model_names(index)
    means = fitting(saved, parts.state_names(wanted.model))
    names = {means[name]: shape for name, shape in saved.items()}
    if "optimizer" in content:
        content = {**content, "optimizer": _renamed(content["optimizer"], means)}
    wrong = [] if wanted.model is None else parts.check_model(wanted.model, names, wanted.strict)
    if wanted.optimizer is not None and "optimizer" in content:
        wrong += parts.check_optimizer(wanted.model, wanted.optimizer, content["optimizer"])
    wrong += parts.check_also(wanted.also, None if mine is None else mine["also"])
    wrong = agree(session, wrong)
    if wrong:
        raise UsageError(f"{save.folder} does not fit this script: {'; '.join(wrong)}")
    user = decoder.decode(content.get("user"))
    if mine is not None:
        parts.load_also(wanted.also, mine["also"], decoder)
    if wanted.optimizer is not None and wanted.states and "optimizer" in content:
        parts.load_groups(wanted.optimizer, content["optimizer"], decoder)
    if wanted.model is not None:
        _fix_plan(session, wanted.model, content, saved.keys())
        land_with(wanted.model, lambda: _land(session, reader, means, wanted, decoder))
    if wanted.random_states and mine is not None:
        parts.load_random(session, mine, exact, decoder)
    return user


def _renamed(saved: Mapping[str, Any], means: Mapping[str, str]) -> dict[str, Any]:
    """What was saved of an optimizer, with the model's names for its parameters."""
    groups = [
        {**group, "params": [means.get(name, name) for name in group["params"]]} for group in saved["groups"]
    ]
    return {**saved, "groups": groups}


def land_with(model: Any, land: Callable[[], None]) -> None:
    """Run ``land`` now if the model is split already, else right after the split."""
    if model.partitioned:
        land()
    else:
        model.register_post_partition_hook(lambda *_: land())


def model_names(index: Index) -> dict[str, tuple[int, ...]]:
    """The model's tensors in a save, further names of tied ones too: their shapes."""
    names = {
        path.removeprefix("model/"): entry.shape
        for path, entry in index.tensors.items()
        if path.startswith("model/")
    }
    aliases = index.content.get("model", {}).get("aliases", {})
    return names | {alias: names[first] for alias, first in aliases.items()}


def _fix_plan(session: Session, model: Any, content: Mapping[str, Any], saved: Collection[str]) -> None:
    """The split of the checkpoint is this job's too, where its settings ask for the same kind of split, and the model
    has the tensors that were saved, neither more nor fewer."""
    text = content.get("model", {}).get("plan")
    before = {name: value for name, value in content["settings"].items() if name not in APART}
    same = before == split_settings(session) and saved == parts.state_names(model)
    if text is None or model.partitioned or not same or not session.settings.auto_partition:
        return
    plan = Plan.from_json(text)
    here = {name for name, _ in model.module.named_modules()}
    if all(unit.name in here for unit in plan.units):
        model.resumed_plan = plan


def split_settings(session: Session) -> dict[str, Any]:
    """The settings on which a split depends."""
    kept = json.loads(session.settings.to_json())
    return {name: value for name, value in kept.items() if name not in APART}


def _land(
    session: Session, reader: ShardReader, means: Mapping[str, str], wanted: Wanted, decoder: Decoder
) -> None:
    """``means``: for each name in the checkpoint the model's."""
    content = reader.index.content
    aliases = content.get("model", {}).get("aliases", {})
    given = {name: saved for saved, name in means.items()}
    parts.load_model(
        session,
        wanted.model,
        given,
        lambda name: reader.read(f"model/{aliases.get(given[name], given[name])}"),
    )
    parts.load_extra(session, wanted.model, content["extra"], decoder)
    if wanted.optimizer is not None and "optimizer" in content:
        keys: dict[str, dict[str, str]] = {}
        for path in reader.index.tensors:
            if path.startswith("optimizer/"):
                name, _, key = path.removeprefix("optimizer/").rpartition("/")
                if wanted.states or key == MASTERS:
                    keys.setdefault(means.get(name, name), {})[key] = path
        values = {means.get(name, name): value for name, value in content["optimizer_values"].items()}
        parts.load_optimizer(
            session, wanted.model, wanted.optimizer, keys, values if wanted.states else {},
            content["optimizer"].get("more"), reader.read, decoder,
        )  # fmt: skip
    log.info("rank %d read %d bytes of %s", session.rank, reader.bytes_read, reader.folder)
    reader.close()
