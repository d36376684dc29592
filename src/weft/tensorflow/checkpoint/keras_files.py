"""The files of Keras (``.keras``, ``.weights.h5``, ``.h5``) of a model that is split: written whole, read by parts.

write    the ranks of the first pipeline give the first rank their variables, and what their optimizers keep; that one
         writes what plain Keras would have written, under another name first
read     every rank compares the file with the model, then reads its own part; if one rank cannot, none does
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from weft.checkpoint.agree import check_same_call, gather_faults
from weft.checkpoint.folder import explain
from weft.checkpoint.save import Saves, meet
from weft.errors import CheckpointError, UsageError
from weft.session.collectives import agree_on, broadcast_text
from weft.tensorflow import private
from weft.tensorflow.checkpoint.contents import (
    check_known,
    fit,
    name_variables,
    optimizer_state,
    variables_of,
)
from weft.tensorflow.checkpoint.export import check_loadable, gathered
from weft.tensorflow.checkpoint.restore import AllRanks
from weft.tensorflow.checkpoint.tensor_files import array_of
from weft.tensorflow.session.session import Session, free_others, is_here, session
from weft.untrusted import parse_json, shown_text

FAILED = (OSError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile)
"""The errors of h5py, zipfile and Keras for a file that cannot be written, or read."""


class UnreadableFile(CheckpointError, OSError):
    """A file of weights is not there, damaged or none; Keras's own callbacks wait for an ``OSError``."""


def write(model: Any, path: Any, call: str, act: Callable[[Any, Any], None]) -> None:
    """Let the first rank write a file: ``act(net, path)``, where ``net`` is whole, with its optimizer.

    Every rank calls this, outside of a step; replicas do nothing.

    Raises:
        UsageError: What an optimizer keeps is not known before the first step.
        CheckpointError: On the first rank: the disk does not take it; PeerError with its text on the others.
    """
    joined = session()
    joined.check_outside(call)
    if model.waits and _kept(model) is not None:
        raise UsageError(
            "the job was resumed, and what its optimizer keeps arrives with the first step: save after that"
        )
    _check_same_call(joined, call, str(path))
    if joined.position("rdp"):
        return

    def make() -> str:
        with model.whole(), _with_optimizer(model, optimizer) as net:
            held = [*net.variables, *variables_of(optimizer)] if optimizer is not None else net.variables
            _write_whole(path, sum(private.bytes_of(each) for each in held), lambda name: act(net, name))
        return ""

    with joined.doing(call), gathered(joined, model):
        optimizer = _whole_optimizer(joined, model)
        agree_on(joined, joined.port("pp"), make, call, joined.peers("pp")[0])


def _check_same_call(joined: Session, call: str, path: str) -> None:
    """Return when every rank of the first pipeline has made the same call; else an error names those that did not."""
    if joined.place.world_size == 1:
        return
    joined.monitor.note("checkpoint", joined.steps)
    try:
        meeting = Saves.of(joined).meeting(f"{call}({path!r})")
        if not joined.position("rdp"):  # copies only count it
            meet(meeting, {"call": call, "path": path})
            meeting.part()
    finally:
        joined.monitor.note("", joined.steps)


def save(model: Any, path: Any, overwrite: bool = True, **options: Any) -> None:
    """Write the whole model, as Keras's ``save`` does."""
    check_loadable(model, Path(path))
    write(model, path, "save", lambda net, name: type(net).save(net, name, overwrite=overwrite, **options))


def _write_whole(path: Any, least: int, write_to: Callable[[Any], None]) -> None:
    """Write a file that appears whole or not at all, and has so many bytes at least."""
    target = Path(path)
    if "://" in str(path) or target.suffix not in (".keras", ".h5"):
        write_to(path)
        return
    partial = target.with_name(f".partial-{os.getpid()}-{target.name}")
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                raise IsADirectoryError(f"{target} is a directory")
            if shutil.disk_usage(target.parent).free < least:  # h5py does not survive it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            write_to(partial)
            os.replace(partial, target)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        reason = explain(error, target.parent) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{shown_text(str(target))} was not written: {reason}") from error


def _kept(model: Any) -> Any:
    """The optimizer whose states files hold; None for ``tf_keras``, and where there is none."""
    return None if private.is_of_keras_two(model) else getattr(model, "optimizer", None)


def _named(model: Any) -> dict[str, Any]:
    """The variables of the whole model that an optimizer may train, by name."""
    found = name_variables(model.all_variables())
    return {name: each for name, each in found.items() if each.trainable}


def _whole_optimizer(joined: Session, model: Any) -> Any:
    """On the first rank an optimizer with the states of all ranks' ones; every rank of the pipeline calls this."""
    optimizer = _kept(model)
    if optimizer is None or not model.partitioned or joined.settings.partitions == 1:
        return optimizer
    named, port = _named(model), joined.port("pp")
    here = joined.position("pp")
    slots, own = optimizer_state(optimizer, named)
    check_known(joined, optimizer, own)
    mine = {name for name, variable in named.items() if (model.owner_of(variable) or 0) == here}
    given = {path: each for path, each in slots.items() if path.rpartition("/")[0] in mine} | own
    found: dict[str, Any] = {}
    for rank in joined.peers("pp"):
        theirs = _broadcast_values(port, rank, given if rank == joined.rank else {})
        behind = any(
            name.startswith("iter") and theirs[name] < found[name] for name in theirs.keys() & found.keys()
        )
        found |= {name: each for name, each in theirs.items() if "/" in name or not behind}
    if here:
        return optimizer
    made = type(optimizer).from_config(optimizer.get_config())
    with model.whole():
        _give(model, made, found)
    return made


def _broadcast_values(port: Any, rank: int, variables: dict[str, Any]) -> dict[str, Any]:
    """The values of a rank's variables by name, on every rank."""
    arrays = {name: array_of(each) for name, each in variables.items()}
    kinds = json.dumps({name: [each.dtype.name, each.shape] for name, each in arrays.items()})
    found = {}
    for name, (dtype, shape) in parse_json(broadcast_text(kinds, rank, port)).items():
        content = port.broadcast_bytes(arrays[name].tobytes() if name in arrays else b"", rank)
        found[name] = np.frombuffer(content, tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
    return found


def _give(model: Any, optimizer: Any, values: dict[str, Any]) -> None:
    """Give an optimizer these states, by name; it is built for the trained variables of the model that are in sight."""
    if not optimizer.built and any("/" in name for name in values):
        private.build_optimizer(optimizer, model.trainable_variables)
    slots, own = optimizer_state(optimizer, _named(model))
    means = {name: name for name in slots} | fit(list(own), [name for name in values if "/" not in name])
    for name, variable in (slots | own).items():
        if means[name] in values:
            variable.assign(values[means[name]])


@contextmanager
def _with_optimizer(model: Any, optimizer: Any) -> Iterator[Any]:
    """The model as plain Keras has it: the one that was handed over, compiled, with an optimizer of the whole model."""
    net, before = model.module, dict(model.module.__dict__)
    try:
        if getattr(model, "compiled", False) and not private.is_of_keras_two(model):
            private.share_compiled(model, net)
            private.set_untracked(net, "optimizer", optimizer)
            private.set_untracked(net, "_compile_config", getattr(model, "_compile_config", None))
        yield net
    finally:
        net.__dict__.clear()
        net.__dict__.update(before)


def read(model: Any, path: Any, call: str, act: Callable[[Any, Any], None]) -> None:
    """Let every rank read its part of a file: ``act(net, path)``, where ``net`` is whole, with its optimizer.

    Raises:
        CheckpointError: On every rank: the file is not there, or cannot be read. An ``OSError`` too.
        UsageError: On every rank: it does not fit the model. Nothing has changed.
    """
    joined = session()
    joined.check_outside(call)
    check_same_call(joined, call, str(path))
    if private.is_of_keras_two(model):
        _read_whole(model, path, act)
        return
    made, mine = _optimizer_as_saved(model)
    own = joined.position("pp")

    def target(variable: Any) -> Any:
        found = mine.get(id(variable), variable)
        return found if found is not None and model.owner_of(found) in (None, own) else None

    with model.whole(), _with_optimizer(model, made) as net:
        faults = []
        try:
            with private.values_checked(target):
                act(net, path)
        except FAILED as error:
            faults = [_in_words(path, error)]
        _refuse(gather_faults(AllRanks(joined), faults))
        try:
            with private.values_taken(target):
                act(net, path)
        except private.UnreadableTensor as error:
            raise UnreadableFile(f"{error}. Some variables have other values already: start again") from error


def _optimizer_as_saved(model: Any) -> tuple[Any, dict[int, Any]]:
    """The optimizer of the whole model that files know, and the variable of this rank for each of its variables.

    It has no memory where the model is split: then no variable of another partition has one here.
    """
    optimizer = _kept(model)
    if optimizer is None or not model.partitioned or session().settings.partitions == 1:
        return optimizer, {}
    made = type(optimizer).from_config(optimizer.get_config())
    with model.whole(), private.variables_wait(of_layers=False):
        private.build_optimizer(made, model.trainable_variables)
    if not optimizer.built:
        private.build_optimizer(optimizer, model.trainable_variables)
    theirs, mine = optimizer_state(made, _named(model)), optimizer_state(optimizer, _named(model))
    names = {name: name for name in mine[0]} | fit(list(mine[1]), list(theirs[1]))
    by_name = {names[name]: each for name, each in (mine[0] | mine[1]).items()}
    return made, {id(each): by_name.get(name) for name, each in (theirs[0] | theirs[1]).items()}


def _refuse(faults: list[str]) -> None:
    if faults:
        kind = UnreadableFile if any(each.startswith(UNREADABLE) for each in faults) else UsageError
        raise kind("; ".join(faults))


def _read_whole(model: Any, path: Any, act: Callable[[Any, Any], None]) -> None:
    """Let every rank read the whole file into a model of ``tf_keras``, and keep its part."""
    joined = session()
    before = [(each, array_of(each, copy=True)) for each in model.all_variables() if is_here(each)]
    faults = []
    try:
        with model.whole(), _with_optimizer(model, None) as net:
            act(net, path)
    except FAILED as error:
        faults = [_in_words(path, error)]
    faults = gather_faults(AllRanks(joined), faults)
    for variable, value in before if faults else ():
        variable.assign(value)
    if model.partitioned and joined.settings.partitions > 1:
        free_others([model])
    _refuse(faults)


UNREADABLE = "no weights can be read from "


def _in_words(path: Any, error: BaseException) -> str:
    shown = shown_text(str(path))
    if isinstance(error, private.UnreadableTensor):
        return f"{error}. Nothing was changed"
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return f"the weights in {shown} do not fit the model, nothing was changed: {error}"
    if isinstance(error, FileNotFoundError):
        return f"{UNREADABLE}{shown}: there is no such file on a rank's host"
    return (
        f"{UNREADABLE}{shown} ({type(error).__name__}: {error}): the file is damaged, or none of Keras; take another "
        "copy of it, or an earlier one. Nothing was changed"
    )


def values(model: Any) -> list[Any]:
    """The values of all variables of the model, in its order, on every rank of the pipeline."""
    joined = session()
    joined.check_outside("get_weights")
    with model.whole():
        variables = model.weights
    if not model.partitioned or joined.settings.partitions == 1:
        return [array_of(each, copy=True) for each in variables]
    here, ranks, port = joined.position("pp"), joined.peers("pp"), joined.port("pp")
    found = []
    _check_same_call(joined, "get_weights", "")
    with joined.doing("get_weights()"):
        for variable in variables:
            owner, kept = model.owner_of(variable), private.underlying(variable)
            if owner is None:
                found.append(array_of(variable, copy=True))
                continue
            content = array_of(variable).tobytes() if owner == here else b""
            content = port.broadcast_bytes(content, ranks[owner])
            found.append(np.frombuffer(content, kept.dtype.as_numpy_dtype).reshape(kept.shape).copy())
    return found


def set_values(model: Any, given: list[Any]) -> None:
    """Give all variables of the model these values, in its order: each rank takes its own.

    Raises:
        UsageError: They are not those of the model; nothing was changed.
    """
    with model.whole():
        variables = model.weights
    shapes = [tuple(np.shape(each)) for each in given]
    wanted = [tuple(each.shape) for each in variables]
    if shapes != wanted:
        at = next(
            (n for n, (one, other) in enumerate(zip(shapes, wanted, strict=False)) if one != other), None
        )
        text = f"number {at} has the shape {shapes[at]}, and not {wanted[at]}" if at is not None else ""
        raise UsageError(
            f"set_weights takes the {len(wanted)} arrays of the whole model, as get_weights gives them: "
            + (text or f"{len(given)} were given")
        )
    own = session().position("pp")
    for variable, value in zip(variables, given, strict=True):
        if model.owner_of(variable) in (None, own):
            variable.assign(value)
