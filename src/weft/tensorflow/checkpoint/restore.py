"""A save that was chosen: checked against the script, and taken by each rank as far as it owns the variables."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.checkpoint.agree import gather_faults
from weft.checkpoint.find import Found
from weft.checkpoint.index import Index
from weft.errors import CheckpointError, UsageError
from weft.session.collectives import broadcast_text, gather_texts
from weft.tensorflow import private
from weft.tensorflow.checkpoint import held, user_values
from weft.tensorflow.checkpoint.contents import FRAMEWORK, Contents, fit, optimizer_state
from weft.tensorflow.checkpoint.tensor_files import ShardReader
from weft.tensorflow.session.session import Session
from weft.untrusted import listed, translated

log = logging.getLogger("weft")


class AllRanks:
    """All ranks of a session's job, as ``weft.checkpoint.agree`` asks for them."""

    def __init__(self, joined: Session) -> None:
        self._session = joined
        self.rank, self.count = joined.rank, joined.place.world_size

    def gather(self, text: str) -> list[str]:
        with self._session.doing("resume_from_checkpoint()"):
            return gather_texts(text, self._session.port())

    def broadcast(self, text: str) -> str:
        with self._session.doing("resume_from_checkpoint()"):
            return broadcast_text(text, 0, self._session.port())


@dataclass
class Kept:
    """The state of an optimizer in a save.

    Attributes:
        slots: The paths of its slots by their names here.
        trained: The names here of the variables that it was built for.
        models: The models that those are of.
        own: The paths of its other variables that the optimizer here has not made yet, by their names in the save.
    """

    slots: dict[str, str]
    trained: list[str]
    models: list[Any]
    own: dict[str, str]


@dataclass
class Landing:
    """The targets of a save's values on this rank.

    Attributes:
        targets: The variables that get a value now, by the path of the value in the save.
        optimizers: What goes to each optimizer when partitions are known, by its section.
        user: The user's content.
    """

    targets: list[tuple[str, Any]] = field(default_factory=list)
    optimizers: dict[str, Kept] = field(default_factory=dict)
    user: Any = None


def restore(
    joined: Session, save: Found, what: Contents, strict: bool, optional: Collection[str], level: str
) -> Any:
    """Give the contents their values back; the user's content.

    Nothing is changed before everything was compared with the script, and the bytes with their checksums, on every
    rank. ``optional``: models and optimizers that the save need not have. ``level``: how the save was verified.
    """
    assert save.index is not None
    reader = ShardReader(save.folder, save.index, verified=level == "full")
    landing, wrong, damage = Landing(), [], []
    try:
        with translated(f"{save.folder} holds what weft did not write", CheckpointError, "do not use it"):
            wrong = find_misfits(reader, what, strict, optional)
            if not wrong:
                landing = plan(joined, reader, what)
                paths = [path for path, _ in landing.targets]
                for kept in landing.optimizers.values():
                    paths += [*kept.slots.values(), *kept.own.values()]
                for path in paths:
                    reader.check(path)
    except CheckpointError as error:
        damage = [str(error)]
    damage = gather_faults(AllRanks(joined), damage)
    if damage:
        raise CheckpointError("; ".join(damage))
    wrong = gather_faults(AllRanks(joined), wrong)
    if wrong:
        raise UsageError(f"{save.folder} does not fit this script: {'; '.join(wrong)}")
    for path, variable in landing.targets:
        variable.assign(reader.read(path))
    for section, kept in landing.optimizers.items():
        held.hold(what.optimizers[section], functools.partial(_take_averages, reader, what, kept))
    for section, kept in list(landing.optimizers.items()):
        when_known(joined, kept.models, functools.partial(_land, joined, reader, what, landing, section))
    if not _saved(what.optimizers, save.index):
        _close_read(joined, reader)
    return landing.user


def find_misfits(reader: ShardReader, what: Contents, strict: bool, optional: Collection[str]) -> list[str]:
    """Faults of a save that does not fit the script; all of them."""
    index = reader.index
    if index.content.get("framework") != FRAMEWORK:
        return ["it was saved by weft.torch: resume it there"]
    wrong: list[str] = []
    for section in _saved(what.models, index):
        mine, saved = what.named(section), _names(index, section)
        means = fit(list(mine), saved)
        if strict:
            missing = [name for name, theirs in means.items() if theirs not in saved]
            unknown = sorted(set(saved) - set(means.values()))
            wrong += [f"{listed(missing)} is missing"] if missing else []
            wrong += [f"{listed(unknown)} is not part of the {section}"] if unknown and mine else []
        if saved and not mine:
            wrong.append(
                f"{listed(sorted(saved))} is not part of the {section} (its variables do not exist before the first "
                "step: resume after that)"
            )
        wrong += _unlike(index, {f"{section}/{means[name]}": each for name, each in mine.items()})
    for name in what.variables:
        if strict and f"variables/{name}" not in index.tensors:
            wrong.append(f"there is no variable {name}")
    wrong += _unlike(index, {f"variables/{name}": each for name, each in what.variables.items()})
    for section in {*what.models, *what.optimizers} - set(optional):
        if strict and section not in {**index.content["names"], **index.content["optimizers"]}:
            wrong.append(f"there is no {section}")
    for section in _saved(what.optimizers, index):
        mine_class, theirs = type(what.optimizers[section]).__name__, index.content["optimizers"][section]
        if mine_class != theirs:
            wrong.append(f"the {section} was a {theirs}, the script has a {mine_class}")
    return wrong


def _saved(sections: Mapping[str, Any], index: Index) -> list[str]:
    """Those of the sections that the save has."""
    return [
        name for name in sections if name in index.content["names"] or name in index.content["optimizers"]
    ]


def _names(index: Index, section: str) -> list[str]:
    """The names of a model's variables in a save, in the model's order."""
    return [name for name in index.content["names"][section] if f"{section}/{name}" in index.tensors]


def _unlike(index: Index, targets: Mapping[str, Any]) -> list[str]:
    """Variables whose shape or type is not that of the value in the save."""
    wrong = []
    for path, variable in targets.items():
        entry, kept = index.tensors.get(path), private.underlying(variable)
        if entry is None:
            continue
        if not kept.shape.is_compatible_with(entry.shape):
            wrong.append(f"{path} has the shape {list(entry.shape)}, the script needs {list(kept.shape)}")
        elif kept.dtype.name != entry.dtype:
            wrong.append(f"{path} holds {entry.dtype}, the script needs {kept.dtype.name}")
    return wrong


def plan(joined: Session, reader: ShardReader, what: Contents) -> Landing:
    """The targets of the values of a save that fits."""
    index, here = reader.index, joined.position("pp")
    landing = Landing(user=user_values.decode(index.content.get("user"), reader.array))
    means: dict[str, str] = {}  # of each variable of the models, how an optimizer's slots in the save call it
    models: dict[str, Any] = {}  # ... and its model
    for section in _saved(what.models, index):
        named = what.named(section)
        start = "" if len(what.models) == 1 else f"{section}/"
        for name, theirs in fit(list(named), _names(index, section)).items():
            means[f"{start}{name}"] = f"{start}{theirs}"
            models[f"{start}{name}"] = what.models[section]
            if what.owner_of(named[name]) in (None, here):
                landing.targets.append((f"{section}/{theirs}", named[name]))
    landing.targets += [(f"variables/{name}", each) for name, each in what.variables.items()]
    landing.targets = [(path, each) for path, each in landing.targets if path in index.tensors]
    saved: dict[str, list[str]] = {}
    for path in index.tensors:
        saved.setdefault(path.rpartition("/")[0], []).append(path)
    for section in _saved(what.optimizers, index):
        optimizer = what.optimizers[section]
        _, own = optimizer_state(optimizer, what.trainable())
        saved_own = _own_state(reader, section)
        theirs_of = fit(list(own), list(saved_own))
        landing.targets += [
            (saved_own[theirs_of[name]], own[name]) for name in own if theirs_of[name] in saved_own
        ]
        built = index.content["optimizer_values"]
        slots = {
            f"{name}/{path.rpartition('/')[2]}": path
            for name, theirs in means.items()
            for path in saved.get(f"{section}/{theirs}", ())
        }
        trained = [
            name
            for name, theirs in means.items()
            if f"{section}/{theirs}" in built or f"{section}/{theirs}" in saved
        ]
        concerned = list({id(models[name]): models[name] for name in trained}.values())
        later = {name: path for name, path in saved_own.items() if name not in theirs_of.values()}
        landing.optimizers[section] = Kept(slots, trained, concerned, later)
    return landing


def _own_state(reader: ShardReader, section: str) -> dict[str, str]:
    """The paths of an optimizer's variables that are of no other variable: those of the rank that has counted most."""
    found: dict[str, dict[str, str]] = {}
    for path in reader.index.tensors:
        where, _, name = path.partition("/")
        if where.startswith(f"{section}@"):
            found.setdefault(where, {})[name] = path
    counted = {
        where: max((int(reader.array(path)) for name, path in paths.items() if name.startswith("iter")), default=0)
        for where, paths in found.items()
    }  # fmt: skip
    return found[max(counted, key=lambda where: counted[where])] if found else {}


def when_known(joined: Session, models: Collection[Any], act: Callable[[], None]) -> None:
    """Run ``act`` once the partitions of all these models' variables are known."""
    unknown = next((model for model in models if not model.partitioned), None)
    if unknown is not None and joined.settings.partitions > 1:
        unknown.when_partitioned(lambda: when_known(joined, models, act))
    else:
        act()


def _land(joined: Session, reader: ShardReader, what: Contents, landing: Landing, section: str) -> None:
    """Give an optimizer what it keeps for this rank's variables; one without such variables makes them now."""
    here, kept, optimizer = joined.position("pp"), landing.optimizers.pop(section), what.optimizers[section]
    held.release(optimizer)
    named = {name: each for name, each in what.trainable().items() if what.owner_of(each) in (None, here)}
    wanted = {name: path for name, path in kept.slots.items() if name.rpartition("/")[0] in named}
    state, before = optimizer_state(optimizer, named)
    if not wanted.keys() <= state.keys() or (kept.own and not getattr(optimizer, "built", True)):
        trained = [each for name, each in named.items() if name in kept.trained]
        private.build_optimizer(optimizer, trained)
        state, own = optimizer_state(optimizer, named)
        theirs = fit(list(own), [*before, *kept.own])
        wanted |= {name: kept.own[theirs[name]] for name in own if theirs[name] in kept.own}
        state |= own
    missing = sorted(wanted.keys() - state.keys())
    wrong = [f"the {section} keeps no {listed(missing)}"] if missing else []
    wrong += _unlike(reader.index, {path: state[name] for name, path in wanted.items() if name in state})
    unknown = [
        name
        for name, path in kept.own.items()
        if path not in wanted.values() and reader.index.tensors[path].shape
    ]
    if unknown:
        wrong.append(f"the save keeps {listed(unknown)} of the {section}, and does not say for which weights")
    if wrong:
        raise CheckpointError(f"{reader.folder} does not fit this script: {'; '.join(wrong)}")
    for name, path in wanted.items():
        state[name].assign(reader.read(path))
    if not landing.optimizers:
        _close_read(joined, reader)


def _take_averages(reader: ShardReader, what: Contents, kept: Kept, variables: list[Any]) -> None:
    """Give variables of models the averages that their optimizer had of them (``use_ema``), if it had."""
    names = {id(each): name for name, each in what.trainable().items()}
    for variable in variables:
        path = kept.slots.get(f"{names.get(id(variable))}/average")
        if path is not None:
            variable.assign(reader.read(path))


def _close_read(joined: Session, reader: ShardReader) -> None:
    log.info("rank %d read %d bytes of %s", joined.rank, reader.bytes_read, reader.folder)
    reader.close()
