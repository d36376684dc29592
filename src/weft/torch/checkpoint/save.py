"""``save_checkpoint`` and ``resume_from_checkpoint``: a training job to files and back, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.agree import check_same_call
from weft.checkpoint.names import check_path, check_tag
from weft.checkpoint.save import PendingSave, Request, SaveReport, Saves, Storage, run
from weft.checkpoint.shard import Part
from weft.errors import UsageError
from weft.torch.checkpoint import named_state, restore, whole_file
from weft.torch.checkpoint.tensor_files import stage, write_shard
from weft.torch.model import DistributedModel
from weft.torch.optimizer import DistributedOptimizer
from weft.torch.session import current
from weft.torch.session.session import Session
from weft.torch.tensors import saved_values

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
        optimizer: Its optimizer, or a list of several; partial saves only.
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
    session = current.session()
    root = check_path(path)
    check_tag(tag)
    also = named_state.need_states(also)
    _check_model(model, optimizer)
    if num_kept_partial_checkpoints is not None and (
        not isinstance(num_kept_partial_checkpoints, int) or num_kept_partial_checkpoints < 1
    ):
        raise UsageError(
            f"num_kept_partial_checkpoints is {num_kept_partial_checkpoints!r}: write a whole number from 1 on, or None"
        )
    optimizers = named_state.list_of(optimizer)
    shared = any(isinstance(each, DistributedOptimizer) and each.shares is not None for each in optimizers)
    sharded = model is not None and model.sharded
    cut = model is not None and model.cut
    request = Request(
        root, tag, num_kept_partial_checkpoints, asynchronous, lambda phase: reached(phase),
        everybody=sharded or cut or (shared and partial), settings=session.agreement.settings(),
    )  # fmt: skip
    if not partial:
        if asynchronous:
            raise UsageError("a full checkpoint is not written asynchronously: pass partial=True")
        return whole_file.save(session, request, model, user_content, allow_pickle)
    if session.rehearsal is not None:
        nothing = SaveReport(root, 0, 0.0, 0.0)
        return PendingSave(lambda: nothing).start() if asynchronous else nothing
    if model is not None and not model.partitioned:
        raise UsageError("the model has no partition yet, which the first step makes: save after it")

    def make() -> Part:
        part = Part()
        first = session.position("rdp") == session.position("tp") == 0
        if model is not None and (first or sharded or cut):
            # what ranks have gathered, the first of them saves
            named_state.add_model(part if first else Part(), session, model)
        if model is not None and (first or shared or sharded or cut):
            for number, each in enumerate(optimizers):
                named_state.add_optimizer(part, session, model, each, number)
        if session.rank == session.mesh.group("mp", 0)[0]:
            _add_shared(part, session, user_content, allow_pickle)
        named_state.add_rank(part, session, also, allow_pickle)
        return part

    if sharded or cut:  # putting tensors together must not wait for a rank that does not come
        check_same_call(session, "save_checkpoint", tag)
    return run(session, request, make, Storage(stage, write_shard))


def _check_model(model: Any, optimizer: Any) -> None:
    if model is not None and not isinstance(model, DistributedModel):
        raise UsageError(f"model is a {type(model).__qualname__}: pass the DistributedModel")
    if optimizer is not None and model is None:
        raise UsageError("an optimizer is saved by its parameters' names: pass its model too")


def _add_shared(part: Part, session: Session, user_content: Any, allow_pickle: bool) -> None:
    mesh = session.mesh
    part.content["user"] = saved_values.encoder(part.tensors, "user", allow_pickle).encode(
        user_content, "user_content"
    )
    part.content["steps"] = session.steps
    part.content["settings"] = restore.split_settings(session)
    part.content["layout"] = {"world": mesh.world_size, "partitions": mesh.pp, "placement": mesh.placement}
    if mesh.tp > 1:
        part.content["layout"]["tensor_parallel"] = mesh.tp


def finish_checkpoint() -> SaveReport | None:
    """Wait for the asynchronous save that goes on; what it took, or None if there is none. Its error is raised."""
    saves = Saves.of(current.session())
    return saves.finish()
