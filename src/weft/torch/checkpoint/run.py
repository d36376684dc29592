"""``checkpoints``: a loop of steps that saves as it goes on, and goes on where it was when the script starts again.

enter    what the newest whole save has comes back: model, optimizer, further objects, random states, place in the data
step     after every so many of them, and when the job is asked to end, all ranks save
leave    the last step is saved, unless an exception ends the loop
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from weft.checkpoint.agree import ask_first
from weft.checkpoint.find import saves
from weft.checkpoint.stop import GO_ON, Stop
from weft.errors import UsageError
from weft.foreign import shown
from weft.torch.checkpoint.position import Position
from weft.torch.checkpoint.restore import AllRanks
from weft.torch.checkpoint.resume import only_model, resume_from_checkpoint
from weft.torch.checkpoint.save import finish_checkpoint, save_checkpoint
from weft.torch.model import DistributedModel
from weft.torch.session import current

_Batch = TypeVar("_Batch")
RUN = "run"
"""Under this name the position is among the objects of a save."""


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
        optimizer: Its optimizer; not needed when it is a ``DistributedOptimizer``.
        also: Further objects with ``state_dict()`` and ``load_state_dict()``: schedulers, loss scalers, samplers.
        asynchronous: Whether saves are written beside the training.
        allow_pickle: As for :func:`save_checkpoint` and :func:`resume_from_checkpoint`.

    Raises:
        UsageError: A value is wrong, here or on entering.
        CheckpointError: On entering: there are saves, but none that is whole.
    """
    for name, value in (("every", every), ("keep", keep)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} is {shown(value)}: write a whole number from 1 on")
    if RUN in (also or {}):
        raise UsageError(f"also[{RUN!r}] is taken: the run keeps its own position there; choose another name")
    return Run(Path(path), every, keep, model, optimizer, also or {}, asynchronous, allow_pickle)


class Run:
    """What :func:`checkpoints` makes.

    Attributes:
        step: How many steps have begun, those before a restart included.
        epoch: How many times :meth:`batches` has come to the end of the data.
    """

    def __init__(
        self, path: Path, every: int, keep: int, model: DistributedModel | None, optimizer: Any,
        also: Mapping[str, Any], asynchronous: bool, allow_pickle: bool,
    ) -> None:  # fmt: skip
        self._path, self._every, self._keep = path, every, keep
        self._model, self._optimizer = model, optimizer
        self._also, self._allow_pickle, self._asynchronous = also, allow_pickle, asynchronous
        self._saved = 0
        self._entered = self._ending = False

    @property
    def step(self) -> int:
        return self._position.step

    @property
    def epoch(self) -> int:
        return self._position.epoch

    def __enter__(self) -> Run:
        session = current.session()
        self._model = only_model(session, self._model)
        if self._model is None:
            raise UsageError(
                "there is no model yet: make the DistributedModel before weft.checkpoints is entered"
            )
        self._optimizer = self._model.optimizer if self._optimizer is None else self._optimizer
        if self._optimizer is None:
            raise UsageError("the model has no DistributedOptimizer: pass optimizer= to weft.checkpoints")
        self._position = Position(session.streams)
        self._also = {**self._also, RUN: self._position}
        ranks = AllRanks(session, "weft.checkpoints()")
        if ask_first(ranks, lambda: bool(saves(self._path))):
            resume_from_checkpoint(
                self._path, model=self._model, optimizer=self._optimizer, also=self._also,
                allow_pickle=self._allow_pickle,
            )  # fmt: skip
            self._position.resume()
            self._saved = self.step
        self._reach = session.monitor.reach
        self._stop = Stop(session, AllRanks(session, "the end of a step"))
        self._stop.open()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.close(self._ending)
        self._entered = False
        if error is None:
            self._save()
            finish_checkpoint()

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps to come, up to ``total``; the first of all steps is 1."""
        self._check_entered("steps")
        self._position.begin()
        while self.step < total:
            self._begin_step()
            yield self.step
            self._end_step()

    def batches(
        self, loader: Iterable[_Batch], *, steps: int | None = None, epochs: int | None = None
    ) -> Iterator[_Batch]:
        """The batches to come; each is for one step.

        After a restart the present epoch begins as it had begun, and the batches that were used are drawn and left
        out. The epoch's number goes to the sampler's ``set_epoch``, if it has that.

        Args:
            loader: A ``DataLoader``, or anything that gives the same batches each time it is gone through.
            steps: How many steps there are in all, over as many epochs as it takes; or:
            epochs: How many times the data are gone through.
        """
        self._check_entered("batches")
        if (steps is None) == (epochs is None):
            raise UsageError("batches takes steps= or epochs=, one of the two")
        position = self._position
        position.begin()
        while steps is None or self.step < steps:
            if epochs is not None and self.epoch >= epochs:
                return
            for batch in position.open(loader):
                self._begin_step()
                position.batch += 1
                yield batch
                self._end_step()
                if self.step == steps:
                    return
            if not position.batch:
                raise UsageError(f"{type(loader).__name__} gave no batch: is the data set empty?")
            position.end_epoch()

    def _check_entered(self, name: str) -> None:
        if not self._entered:
            raise UsageError(f"{name} is for inside of the context: with weft.checkpoints(...) as run:")

    def _begin_step(self) -> None:
        self._position.step += 1
        self._reach(self.step)

    def _end_step(self) -> None:
        self._ending = self._stop.after_step()
        if self._ending or self.step % self._every == 0:
            self._save()
        if self._ending:
            finish_checkpoint()
            sys.exit(GO_ON)

    def _save(self) -> None:
        """Save the present step, if it is not saved yet."""
        if self.step == self._saved:
            return
        save_checkpoint(
            self._path, f"step{self.step}", model=self._model, optimizer=self._optimizer,
            user_content={"step": self.step}, num_kept_partial_checkpoints=self._keep,
            also=self._also, asynchronous=self._asynchronous, allow_pickle=self._allow_pickle,
        )  # fmt: skip
        self._saved = self.step
