"""``save_checkpoint`` and ``resume_from_checkpoint``: a training job to files and back, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.checkpoint.find import LEVELS
from weft.checkpoint.names import check_tag
from weft.errors import UsageError
from weft.torch import full, old_partial, parts, resuming, saving, state
from weft.torch.content import Encoder
from weft.torch.model import DistributedModel
from weft.torch.optimizer import DistributedOptimizer
from weft.torch.saving import PendingSave, Request, SaveReport, Saves

log = logging.getLogger("weft")


def reached(phase: str) -> None:
    """Called right before each phase of a save: stage, mkdir, write, flush, checksum, report, barrier, index, folder,
    rename, parent, newest, prune. Tests of faults put something in its place."""


def save_checkpoint(
    path: str | Path,
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    also: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    allow_pickle: bool = False,
) -> SaveReport | PendingSave | None:
    """Save the job under ``path``; every rank calls this, or every rank with ``rdp_rank() == 0``.

    If replicas share the optimizer's state (``shard_optimizer_state``) and it is saved too, or if they share parameters
    (``sharded_data_parallel_degree``), every rank calls this.

    Args:
        path: A folder on a disk that all hosts share; it is made if needed.
        tag: The save's name, the same on every rank. A tag that was used before is saved again beside the earlier
            one, which is removed when the new one is complete.
        partial: Each rank writes its part: model, optimizer, random states. Otherwise one file ``path/tag`` with the
            whole model's state, which plain ``torch.load`` reads, and ``user_content_<tag>`` beside it.
        model: The model to save.
        optimizer: Its optimizer; partial saves only.
        user_content: Numbers, texts, lists, dicts, tensors, NumPy arrays; the first rank's counts.
        translate_if_full: Accepted; the names in a full file are those of the wrapped module anyway.
        num_kept_partial_checkpoints: After this save, keep so many partial ones; the oldest are removed.
        also: Objects with ``state_dict()``: schedulers, scalers, data loaders; each rank's own is saved.
        asynchronous: Return as soon as everything is copied to host memory; a thread writes. At most one such save
            goes on at a time; its error is raised by the next save or by :func:`finish_checkpoint`.
        allow_pickle: Whether objects of other types may be pickled; reading them needs the same.

    Returns:
        What the save took, or with ``asynchronous`` an object whose ``wait()`` gives that.

    Raises:
        UsageError: On every rank: something given cannot be saved, or not all ranks called. Nothing was written.
        CheckpointError: On every rank: a rank could not write. Earlier checkpoints are as they were.
    """
    session = state.session()
    check_tag(tag)
    also = parts.need_states(also)
    _check_model(model, optimizer)
    if num_kept_partial_checkpoints is not None and (
        not isinstance(num_kept_partial_checkpoints, int) or num_kept_partial_checkpoints < 1
    ):
        raise UsageError(
            f"num_kept_partial_checkpoints is {num_kept_partial_checkpoints!r}: write a whole number from 1 on, or None"
        )
    shared = isinstance(optimizer, DistributedOptimizer) and optimizer.shares is not None
    sharded = model is not None and model.sharded
    request = Request(
        Path(path), tag, num_kept_partial_checkpoints, asynchronous, lambda phase: reached(phase),
        everybody=sharded or (shared and partial),
    )  # fmt: skip
    if not partial:
        if asynchronous:
            raise UsageError("a full checkpoint is not written asynchronously: pass partial=True")
        return full.save(session, request, model, user_content, allow_pickle)
    if model is not None and not model.partitioned:
        raise UsageError("the model has no partition yet, which the first step makes: save after it")

    def make() -> parts.Part:
        part = parts.Part()
        first = session.position("rdp") == 0
        kept = part if first or shared else parts.Part()  # what all ranks put together, the first one saves
        if model is not None and (first or sharded):
            parts.add_model(kept, session, model)
        if model is not None and optimizer is not None and (first or shared or sharded):
            parts.add_optimizer(kept, session, model, optimizer)
        if session.rank == session.mesh.group("mp", 0)[0]:
            _add_shared(part, session, user_content, allow_pickle)
        parts.add_rank(part, session, also, allow_pickle)
        return part

    if sharded:  # putting tensors together must not wait for a rank that does not come
        resuming.come_together(session, "save_checkpoint", tag)
    return saving.run(session, request, make)


def _check_model(model: Any, optimizer: Any) -> None:
    if model is not None and not isinstance(model, DistributedModel):
        raise UsageError(f"model is a {type(model).__qualname__}: pass the DistributedModel")
    if optimizer is not None and model is None:
        raise UsageError("an optimizer is saved by its parameters' names: pass its model too")


def _add_shared(part: parts.Part, session: state.Session, user_content: Any, allow_pickle: bool) -> None:
    mesh = session.mesh
    part.content["user"] = Encoder(part.tensors, "user", allow_pickle).encode(user_content, "user_content")
    part.content["steps"] = session.steps
    part.content["settings"] = resuming.split_settings(session)
    part.content["layout"] = {"world": mesh.world_size, "partitions": mesh.pp, "placement": mesh.placement}


def finish_checkpoint() -> SaveReport | None:
    """Wait for the asynchronous save that goes on; what it took, or None if there is none. Its error is raised."""
    saves = Saves.of(state.session())
    return saves.finish()


def resume_from_checkpoint(
    path: str | Path,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Any = None,
    *,
    model: DistributedModel | None = None,
    optimizer: Any = None,
    also: Mapping[str, Any] | None = None,
    random_states: bool = True,
    verify: str = "full",
    allow_pickle: bool | str = False,
) -> Any:
    """Go on where a saved job was; every rank calls this, after the model and the optimizer were wrapped.

    The number of partitions and replicas and the split may be others than those of the save: each rank reads the
    bytes that it needs. If the model has no partition yet, weights and optimizer states arrive right after it, at
    the first step; the automatic split is then the checkpoint's where the settings are the same.

    Args:
        path: Where the checkpoints are. With ``partial=False`` also a file or folder in another format: ``.pt``,
            ``.safetensors``, a folder with a safetensors index, one of ``torch.distributed.checkpoint``.
        tag: Which one; None takes the one that the file ``newest`` names, or the newest that is whole, and says so.
        partial: As it was saved.
        strict: Whether the names must be exactly the model's.
        load_optimizer: Whether the optimizer gets its state back.
        load_sharded_optimizer_state: If not, the optimizer only gets back the 32-bit masters and the loss scale of
            16-bit training, where a partial checkpoint has them.
        translate_function: For full checkpoints, in any format: given the state with the names in the file, returns it
            with the model's. Names that only a wrapper has changed (``module.``, ``_orig_mod.``) fit without it.
        model: The model; not needed when there is one only.
        optimizer: The optimizer; not needed when the model's is a ``DistributedOptimizer``.
        also: The objects whose states were saved with ``also``.
        random_states: Whether random numbers go on as they would have.
        verify: "full" compares all bytes with their checksums first, the ranks sharing the work; "sizes" compares the
            files' sizes first, and the checksums of what is read.
        allow_pickle: Whether pickled objects may be read, which can run any code. "leave" reads the rest; in the place
            of such an object stands one that says so.

    Returns:
        The user's content.

    Raises:
        CheckpointError: On every rank: there is no checkpoint, or it is incomplete or altered; files are named.
        UsageError: On every rank: it does not fit the script; everything that does not is listed. Nothing changed.
    """
    session = state.session()
    if tag is not None:
        check_tag(tag)
    if verify not in LEVELS:
        raise UsageError(f"verify is {verify!r}: write one of {', '.join(LEVELS)}")
    if allow_pickle not in (True, False, "leave"):
        raise UsageError(f'allow_pickle is {allow_pickle!r}: write True, False or "leave"')
    model = _only_model(session, model)
    if optimizer is None and model is not None:
        optimizer = model.optimizer
    has_masters = partial and isinstance(optimizer, DistributedOptimizer)
    if not load_optimizer or not (load_sharded_optimizer_state or has_masters):
        optimizer = None
    wanted = resuming.Wanted(
        model,
        optimizer,
        parts.need_states(also),
        strict,
        random_states,
        allow_pickle,
        load_sharded_optimizer_state,
    )
    call = "resume_from_checkpoint" if partial else "resume_from_checkpoint(partial=False)"
    resuming.come_together(session, call, tag)
    if not partial:
        return full.resume(session, Path(path), tag, wanted, translate_function)
    if translate_function is not None and session.rank == 0:
        log.warning(
            "translate_function is for full checkpoints (partial=False): a partial one has the names of the model "
            "that was saved, so it is not called"
        )
    old = resuming.told_by_first(session, lambda: str(old_partial.folder_of(Path(path), tag) or ""))
    if old:
        return old_partial.resume(
            session, Path(old), wanted if wanted.states else replace(wanted, optimizer=None)
        )
    save = resuming.choose(session, Path(path), tag, verify)
    return resuming.restore(session, save, wanted, verify)


def _only_model(session: state.Session, model: DistributedModel | None) -> DistributedModel | None:
    if model is not None:
        return model
    if len(session.models) > 1:
        raise UsageError(f"there are {len(session.models)} models: say which one with model=")
    return session.models[0] if session.models else None
