"""``CheckpointManager``: numbered saves in one folder, of all that a ``tf.train.Checkpoint`` names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from weft.checkpoint.agree import ask_first
from weft.checkpoint.find import saves
from weft.checkpoint.names import check_tag
from weft.errors import UsageError
from weft.tensorflow.checkpoint.contents import Contents
from weft.tensorflow.checkpoint.restore import AllRanks
from weft.tensorflow.checkpoint.save import resume, save
from weft.tensorflow.session.session import session
from weft.untrusted import shown, whole


class CheckpointManager:
    """Saves what a checkpoint names as ``ckpt-1``, ``ckpt-2`` and so on, and takes it back.

    Every rank makes one and calls the same methods in the same order.

    Args:
        checkpoint: A ``tf.train.Checkpoint``, or any object; its attributes are models, optimizers, metrics and
            variables, or lists and dicts of these. Of variables, such as a counter of steps, the first rank's count.
        directory: Where the saves go, on a disk that all hosts share. They are those of ``save_checkpoint``.
        max_to_keep: After a save, keep so many in the folder; None keeps all.
        checkpoint_name: The saves are called that, with their number.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str | Path = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        check_tag(f"{checkpoint_name}-1")
        if max_to_keep is not None and (not isinstance(max_to_keep, int) or max_to_keep < 1):
            raise UsageError(f"max_to_keep is {max_to_keep!r}: write a whole number from 1 on, or None")
        self._checkpoint = checkpoint
        self._directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._name = checkpoint_name

    @property
    def checkpoint(self) -> Any:
        """The object that was handed over."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where the saves are."""
        return str(self._directory)

    @property
    def checkpoints(self) -> list[str]:
        """The saves that are there, the oldest first: ``directory/ckpt-1`` and so on."""
        return [str(self._directory / f"{self._name}-{number}") for number in sorted(self._numbers())]

    @property
    def latest_checkpoint(self) -> str | None:
        """The last of them; None if there is none."""
        return next(reversed(self.checkpoints), None)

    def save(self, checkpoint_number: int | None = None) -> str:
        """Save under the next number, or under ``checkpoint_number``; the save's name, with the directory.

        Raises:
            UsageError: On every rank: the checkpoint names something that cannot be saved, or not all ranks called.
            CheckpointError: On every rank: a rank could not write. Earlier saves are as they were.
        """
        what = self._contents()
        if checkpoint_number is not None and whole(str(checkpoint_number)) is None:
            raise UsageError(
                f"checkpoint_number is {shown(checkpoint_number)}: write a whole number, or leave it out"
            )
        number = checkpoint_number
        if number is None:
            number = ask_first(AllRanks(session()), lambda: max(self._numbers(), default=0) + 1)
        tag = f"{self._name}-{number}"
        save(self._directory, tag, what, None, self._max_to_keep, "max_to_keep")
        return str(self._directory / tag)

    def restore(self, restore_prefix: str | None = None) -> str | None:
        """Give all that the checkpoint names its saved values; the name of the save, with the directory.

        ``restore_prefix``: which save, such as ``"ckpt-2"``, with or without the directory. None takes the last; if
        there is none, nothing happens and None comes back. Before the first step or after it.

        Raises:
            CheckpointError: On every rank: it is not there, incomplete or altered.
            UsageError: On every rank: it does not fit what the checkpoint names. Nothing has changed.
        """
        what = self._contents()
        ranks = AllRanks(session())
        if restore_prefix is None:
            latest = ask_first(ranks, lambda: self.latest_checkpoint)
            if latest is None:
                return None
            tag = Path(latest).name
        else:
            given = Path(restore_prefix)
            if given.name != str(given) and given.parent.absolute() != self._directory.absolute():
                raise UsageError(
                    f"restore_prefix is {shown(restore_prefix)}, which is not in {self._directory}: make a "
                    "CheckpointManager for that folder"
                )
            tag = given.name
        resume(self._directory, tag, what, True, (), "full", "CheckpointManager.restore")
        return str(self._directory / tag)

    def _contents(self) -> Contents:
        return Contents.of(
            {name: it for name, it in vars(self._checkpoint).items() if not name.startswith("_")}
        )

    def _numbers(self) -> list[int]:
        pattern = re.compile(rf"{re.escape(self._name)}-(\d{{1,18}})")
        found = (pattern.fullmatch(each.tag) for each in saves(self._directory) if each.index is not None)
        return [int(match[1]) for match in found if match is not None]
