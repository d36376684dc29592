"""``checkpoints``: a loop of steps that saves as it goes on, and goes on where it was when the script starts again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.agree import ask_first
from weft.checkpoint.find import saves
from weft.checkpoint.loop import RUN, Loop, Place
from weft.checkpoint.stop import Stop
from weft.errors import UsageError
from weft.torch.checkpoint.position import Position
from weft.torch.checkpoint.resume import only_model, resume_from_checkpoint
from weft.torch.checkpoint.save import finish_checkpoint, save_checkpoint
from weft.torch.model import DistributedModel
from weft.torch.session import current
from weft.torch.session.collectives import AllRanks


def checkpoints(
    path: str | Path,
    every: int,
    *,
    keep: int = 2,
    model: DistributedModel | None = None,
    optimizer: Any = None,
    also: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    allow_pickle: bool = False,
) -> Run:
    """A run of steps that saves itself, and goes on from its newest save; every rank uses it alike.

    Use it as a context, and take the steps of the loop from it:

        with weft.checkpoints("runs/a", every=100, also={"scheduler": scheduler}) as run:
            for batch in run.batches(loader, epochs=3):
                ...

    Args:
        path: The folder of the saves, on a disk that all hosts share; one for each run.
        every: After how many steps the run is saved. The last step is saved too.
        keep: So many saves are kept.
        model: The model; not needed when there is one only.
        optimizer: Its optimizer, or a list of several; not needed when each is a ``DistributedOptimizer``.
        also: Further objects with ``state_dict()`` and ``load_state_dict()``: schedulers, loss scalers, samplers.
        asynchronous: Whether saves are written beside the training.
        allow_pickle: As for :func:`save_checkpoint` and :func:`resume_from_checkpoint`.

    Raises:
        UsageError: A value is wrong, here or on entering.
        CheckpointError: On entering: there are saves, but none that is whole.
    """
    if RUN in (also or {}):
        raise UsageError(f"also[{RUN!r}] is taken: the run keeps its own position there; choose another name")
    return Run(path, every, keep, model, optimizer, also or {}, asynchronous, allow_pickle)


class Run(Loop):
    """The loop of :func:`checkpoints`."""

    def __init__(
        self, path: str | Path, every: int, keep: int, model: DistributedModel | None, optimizer: Any,
        also: Mapping[str, Any], asynchronous: bool, allow_pickle: bool,
    ) -> None:  # fmt: skip
        super().__init__(path, every, keep)
        self._model, self._optimizer = model, optimizer
        self._also, self._allow_pickle, self._asynchronous = also, allow_pickle, asynchronous

    def _resume(self) -> tuple[Place, Stop, Callable[[int], object]]:
        session = current.session()
        self._model = only_model(session, self._model)
        if self._model is None:
            raise UsageError(
                "there is no model yet: make the DistributedModel before weft.checkpoints is entered"
            )
        self._optimizer = self._model.optimizers if self._optimizer is None else self._optimizer
        if not self._optimizer:
            raise UsageError("the model has no DistributedOptimizer: pass optimizer= to weft.checkpoints")
        position = Position(session.streams)
        self._also = {**self._also, RUN: position}
        ranks = AllRanks(session, "weft.checkpoints()")
        if ask_first(ranks, lambda: bool(saves(self._path))):
            resume_from_checkpoint(
                self._path, model=self._model, optimizer=self._optimizer, also=self._also,
                allow_pickle=self._allow_pickle,
            )  # fmt: skip
            position.resume()
        return position, Stop(session, AllRanks(session, "the end of a step")), session.monitor.reach

    def _write(self, tag: str) -> None:
        save_checkpoint(
            self._path, tag, model=self._model, optimizer=self._optimizer,
            user_content={"step": self.step}, num_kept_partial_checkpoints=self._keep,
            also=self._also, asynchronous=self._asynchronous, allow_pickle=self._allow_pickle,
        )  # fmt: skip

    def _finish(self) -> None:
        finish_checkpoint()
