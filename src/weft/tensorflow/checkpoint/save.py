"""``save_checkpoint`` and ``resume_from_checkpoint``: a training job to files and back, on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.agree import check_same_call, choose
from weft.checkpoint.find import LEVELS
from weft.checkpoint.names import check_path, check_tag
from weft.checkpoint.save import PendingSave, Request, SaveReport, Saves, Storage, run
from weft.checkpoint.shard import Part
from weft.errors import UsageError
from weft.tensorflow.checkpoint import contents, user_values
from weft.tensorflow.checkpoint.contents import Contents
from weft.tensorflow.checkpoint.restore import AllRanks, restore
from weft.tensorflow.checkpoint.tensor_files import stage, write_shard
from weft.tensorflow.session.session import Session, session


def reached(phase: str) -> None:
    """Called right before each phase of a save, as in ``weft.torch``. Tests of faults put something in its place."""


def save_checkpoint(
    path: str | Path,
    tag: str,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    num_kept_partial_checkpoints: int | None = None,
    *,
    asynchronous: bool = False,
) -> SaveReport | PendingSave | None:
    """Save the job under ``path``; every rank calls this, or every rank with ``rdp_rank() == 0``.

    Args:
        path: A folder on a disk that all hosts share; it is made if needed.
        tag: The save's name, the same on every rank. A tag that was used before is saved again beside the earlier
            one, which is removed when the new one is complete.
        model: The ``DistributedModel`` to save. Each rank writes the variables that it owns.
        optimizer: Its optimizer, of Keras 3 or of tf_keras; None saves none.
        user_content: Numbers, texts, lists, dicts, tensors, NumPy arrays; the first rank's counts.
        num_kept_partial_checkpoints: After this save, keep so many; the oldest are removed.
        asynchronous: Return as soon as everything is copied to host memory; a thread writes. At most one such save
            goes on at a time; its error is raised by the next save or by :func:`finish_checkpoint`.

    Returns:
        What the save took, or with ``asynchronous`` an object whose ``wait()`` gives that; None on a rank with
        ``rdp_rank() > 0`` that came when the others had begun.

    Raises:
        UsageError: On every rank: something given cannot be saved, or not all ranks called. Nothing was written.
        CheckpointError: On every rank: a rank could not write. Earlier checkpoints are as they were.
    """
    return save(
        check_path(path), tag, _contents(model, optimizer), user_content, num_kept_partial_checkpoints,
        "num_kept_partial_checkpoints", asynchronous=asynchronous,
    )  # fmt: skip


def finish_checkpoint() -> SaveReport | None:
    """Wait for the asynchronous save that goes on; what it took, or None if there is none. Its error is raised."""
    return Saves.of(session()).finish()


def save(
    root: Path, tag: str, what: Contents, user_content: Any, keep: int | None, keep_name: str,
    of_rank: Mapping[str, Any] | None = None, asynchronous: bool = False,
) -> SaveReport | PendingSave | None:  # fmt: skip
    """Save contents.

    ``keep``: how many saves may stay; ``keep_name``: how the script calls that; ``of_rank``: JSON of this rank alone,
    for which every rank has to come; ``asynchronous``: whether a thread writes.
    """
    joined = session()
    check_tag(tag)
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise UsageError(f"{keep_name} is {keep!r}: write a whole number from 1 on, or None")
    joined.check_outside("saving a checkpoint")
    if any(model.waits for model in what.models.values()):
        raise UsageError(
            "the job was resumed, and what its optimizer keeps arrives with the first step: save after that"
        )

    def make() -> Part:
        part = Part()
        if joined.position("rdp") == 0:
            contents.add(part, joined, what)
            if joined.position("pp") == 0:
                _add_shared(part, joined, user_content)
        place = {"pp": joined.position("pp"), "rdp": joined.position("rdp")}
        part.content["rank"] = {**place, **(of_rank or {})}
        return part

    request = Request(root, tag, keep, asynchronous, lambda phase: reached(phase), of_rank is not None)
    return run(joined, request, make, Storage(stage, write_shard))


def _add_shared(part: Part, joined: Session, user_content: Any) -> None:
    mesh = joined.mesh
    part.content["user"] = user_values.encode(user_content, part.tensors)
    part.content["steps"] = joined.steps
    part.content["layout"] = {"world": mesh.world_size, "partitions": mesh.pp, "placement": mesh.placement}


def resume_from_checkpoint(
    path: str | Path,
    tag: str | None = None,
    strict: bool = True,
    load_optimizer: bool = True,
    *,
    model: Any = None,
    optimizer: Any = None,
    verify: str = "full",
) -> Any:
    """Go on where a saved job was; every rank calls this, before its first step or after it.

    The number of partitions and replicas may be others than those of the save: each rank reads the bytes that it needs.
    Before the first step those are all variables of the model; what the optimizer keeps for variables arrives with the
    first step then, which gives them to partitions.

    Args:
        path: Where the checkpoints are.
        tag: Which one; None takes the one that the file ``newest`` names, or the newest that is whole, and says so.
        strict: Whether the names must be exactly the model's.
        load_optimizer: Whether the optimizer gets its state back.
        model: The model; not needed when there is one only.
        optimizer: The optimizer, if it was saved.
        verify: "full" compares all bytes with their checksums first, the ranks sharing the work; "sizes" compares the
            files' sizes first, and the checksums of what is read.

    Returns:
        The user's content.

    Raises:
        CheckpointError: On every rank: there is no checkpoint, or it is incomplete or altered; files are named.
        UsageError: On every rank: it does not fit the script; everything that does not is listed. Nothing changed.
    """
    models, given = session().models, model is not None
    if model is None and len(models) > 1:
        raise UsageError(f"there are {len(models)} models: say which one with model=")
    model = model or next(iter(models), None)
    what = _contents(model, optimizer if load_optimizer else None)
    optional = () if given else ("model",)
    return resume(check_path(path), tag, what, strict, optional, verify, "resume_from_checkpoint")


def resume(
    root: Path,
    tag: str | None,
    what: Contents,
    strict: bool,
    optional: Collection[str],
    verify: str,
    call: str,
) -> Any:
    """Take contents back; the user's content.

    ``optional``: models and optimizers that the save need not have. ``call``: what the script has called.
    """
    joined = session()
    if tag is not None:
        check_tag(tag)
    if verify not in LEVELS:
        raise UsageError(f"verify is {verify!r}: write one of {', '.join(LEVELS)}")
    joined.check_outside("resuming from a checkpoint")
    check_same_call(joined, call, tag)
    found = choose(AllRanks(joined), root, tag, verify)
    return restore(joined, found, what, strict, optional, verify)


def _contents(model: Any, optimizer: Any) -> Contents:
    if model is not None and model is not contents.model_of(model):
        raise UsageError(f"model is a {type(model).__qualname__}: pass the DistributedModel")
    if optimizer is not None and model is None:
        raise UsageError("an optimizer is saved by its variables' names: pass its model too")
    given = {"model": model, "optimizer": optimizer}
    return Contents.of({name: thing for name, thing in given.items() if thing is not None})
