"""Ranks that resume together: they make the same call, choose the same save, and hear of each other's faults."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from weft.checkpoint.find import Found, faults, in_order, look, ownership, saves
from weft.checkpoint.save import Job, Saves, meet
from weft.errors import CheckpointError, WeftError
from weft.untrusted import translated

log = logging.getLogger("weft")


class Ranks(Protocol):
    """All ranks of a job, which call each method together."""

    @property
    def rank(self) -> int:
        """The number of this one."""

    @property
    def count(self) -> int:
        """The number of ranks."""

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, in their order."""

    def broadcast(self, text: str) -> str:
        """The text of rank 0."""


def check_same_call(job: Job, call: str, tag: str | None) -> None:
    """Return when every rank has made the same call; else :class:`UsageError` that names the ranks that did not."""
    if job.place.world_size == 1:
        return
    job.monitor.note("checkpoint", job.steps)
    try:
        given = "" if tag is None else f"tag={tag!r}"
        meeting = Saves.of(job).meeting(f"{call}({given})", everybody=True)
        meet(meeting, {"call": call, "tag": tag or ""})
        meeting.part()
    finally:
        job.monitor.note("", job.steps)


def gather_faults(ranks: Ranks, faults_here: list[str]) -> list[str]:
    """The faults that any rank has found, on every rank, each once."""
    texts = ranks.gather(json.dumps(faults_here))
    return list(dict.fromkeys(fault for text in texts for fault in json.loads(text)))


def ask_first(ranks: Ranks, make: Callable[[], Any]) -> Any:
    """The value that ``make`` gives on rank 0, on every rank; an error of ``make`` likewise."""
    answer: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            remedy = f"let this user (id {os.geteuid()}) read there"
            with translated("the checkpoints cannot be looked through", CheckpointError, remedy):
                answer = {"value": make()}
        except WeftError as error:
            answer = {"error": str(error)}
    answer = json.loads(ranks.broadcast(json.dumps(answer)))
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer["value"]


def choose(ranks: Ranks, root: Path, tag: str | None, level: str) -> Found:
    """The save to resume from: the first that is whole, the same on every rank.

    With a tag only that tag's saves count; if none of them is whole, the error offers the newest one that is.
    """
    bad: list[str] = []
    for name, its_tag in ask_first(ranks, lambda: _candidates(root, tag)):
        save = look(root / name)
        wrong = gather_faults(ranks, _faults_here(ranks, save, level))
        if not wrong and (tag is None or its_tag == tag):
            if bad and ranks.rank == 0:
                log.warning(
                    "resuming from %s, because newer checkpoints are not whole: %s", name, "; ".join(bad)
                )
            elif ranks.rank == 0:
                log.info("resuming from %s", save.folder)
            return save
        if not wrong:
            offer = (
                f"The newest one that is whole is {its_tag!r}: resume_from_checkpoint(path, tag={its_tag!r})"
            )
            raise CheckpointError(f"{_none(root, tag, bad)}. {offer}")
        bad += wrong
    raise CheckpointError(f"{_none(root, tag, bad)}. There is no other one that is whole in {root}")


def _candidates(root: Path, tag: str | None) -> list[list[Any]]:
    """Folder and tag of each save that may be chosen, in order, then of those that an error may offer."""
    if not root.is_dir():
        raise CheckpointError(f"{root} is no folder, so there is no checkpoint to resume from")
    warning = ownership(root)
    if warning:
        log.warning("%s", warning)
    first = in_order(root, tag)
    rest = [save for save in saves(root) if tag is not None and save.tag != tag]
    return [[save.folder.name, save.tag] for save in [*first, *rest]]


def _faults_here(ranks: Ranks, save: Found, level: str) -> list[str]:
    """The faults of a save that this rank finds, its share of the bytes compared."""
    if save.index is None:
        return [save.fault]
    try:
        return faults(save.folder, save.index, level, (ranks.rank, ranks.count))
    except OSError as error:  # the others must hear of it
        return [f"{save.folder} cannot be read by rank {ranks.rank}: {error}"]


def _none(root: Path, tag: str | None, bad: list[str]) -> str:
    """That no save can be used."""
    if bad:
        return "the checkpoint cannot be used: " + "; ".join(bad)
    return f"{root} has no checkpoint" + (f" with the tag {tag!r}" if tag is not None else "")
