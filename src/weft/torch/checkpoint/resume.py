"""``resume_from_checkpoint``: a training job goes on where a saved one was, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.checkpoint.agree import ask_first, check_same_call, choose
from weft.checkpoint.find import LEVELS
from weft.checkpoint.names import check_path, check_tag
from weft.errors import UsageError
from weft.torch.checkpoint import named_state, older_scripts, restore, whole_file
from weft.torch.model import DistributedModel
from weft.torch.optimizer import DistributedOptimizer
from weft.torch.session import current
from weft.torch.session.collectives import AllRanks
from weft.torch.session.session import Session

log = logging.getLogger("weft")


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
    bytes that it needs. If the model has no partition yet, every rank reads all weights, which are in the model when
    this returns; optimizer states arrive right after the split, at the first step, each rank's own, or when the
    optimizer is asked for them. The automatic split is then the checkpoint's where the settings are the same.

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
        optimizer: The optimizer, or a list of several in the order in which they were saved; not needed when each of
            the model's is a ``DistributedOptimizer``.
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
    session = current.session()
    root = check_path(path)
    if tag is not None:
        check_tag(tag)
    if verify not in LEVELS:
        raise UsageError(f"verify is {verify!r}: write one of {', '.join(LEVELS)}")
    if allow_pickle not in (True, False, "leave"):
        raise UsageError(f'allow_pickle is {allow_pickle!r}: write True, False or "leave"')
    model = only_model(session, model)
    optimizers = (
        model.optimizers if optimizer is None and model is not None else named_state.list_of(optimizer)
    )
    if not load_sharded_optimizer_state:  # then only masters come back
        optimizers = [each for each in optimizers if partial and isinstance(each, DistributedOptimizer)]
    wanted = restore.Wanted(
        model,
        optimizers if load_optimizer else [],
        named_state.need_states(also),
        strict,
        random_states,
        allow_pickle,
        load_sharded_optimizer_state,
    )
    call = "resume_from_checkpoint" if partial else "resume_from_checkpoint(partial=False)"
    check_same_call(session, call, tag)
    if not partial:
        return whole_file.resume(session, root, tag, wanted, translate_function)
    if translate_function is not None and session.rank == 0:
        log.warning(
            "translate_function is for full checkpoints (partial=False): a partial one has the names of the model "
            "that was saved, so it is not called"
        )
    ranks = AllRanks(session)
    old = ask_first(ranks, lambda: str(older_scripts.find_folder(root, tag) or ""))
    if old:
        return older_scripts.resume(
            session, Path(old), wanted if wanted.states else replace(wanted, optimizers=())
        )
    save = choose(ranks, root, tag, verify)
    return restore.restore(session, save, wanted, verify)


def only_model(session: Session, model: DistributedModel | None) -> DistributedModel | None:
    """The given model, or the only one there is, or None if there is none."""
    if model is not None:
        return model
    if len(session.models) > 1:
        raise UsageError(f"there are {len(session.models)} models: say which one with model=")
    return session.models[0] if session.models else None
