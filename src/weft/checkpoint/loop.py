"""A loop of steps that saves as it goes on, and goes on where it was when the script starts again.

enter    what the newest whole save has comes back, and the loop's position in the data with it
step     after every so many of them, and when the job is asked to end, all ranks save
leave    the last step is saved, unless an exception ends the loop
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from weft.checkpoint.names import check_path
from weft.checkpoint.stop import GO_ON, Stops
from weft.errors import UsageError
from weft.launch.environ import TRIAL
from weft.untrusted import shown

_Batch = TypeVar("_Batch")
_Self = TypeVar("_Self", bound="Loop")
RUN = "run"
"""Under this name a save has the position of the loop."""


class Place(Protocol):
    """Where a loop is in its data.

    Attributes:
        step: How many steps have begun.
        epoch: How many epochs are over.
        batch: How many batches of this epoch were drawn.
    """

    step: int
    epoch: int
    batch: int

    def begin(self) -> None:
        """The loop begins."""

    def open(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of the present epoch that were not drawn yet."""

    def end_epoch(self) -> None:
        """All batches of the epoch were drawn."""


def _of_trial(path: Path) -> Path:
    """The folder of the saves; in a trial of `weft tune` one of the trial's: the script's own stay as they are."""
    trial = os.environ.get(TRIAL, "")
    return Path(trial, "saves", *path.absolute().parts[1:]) if os.path.isdir(trial) else path


class Loop(ABC):
    """The training loop that saves and resumes: what ``weft.checkpoints`` of each framework makes.

    Attributes:
        step: How many steps have begun, those before a restart included.
        epoch: How many times :meth:`batches` has come to the end of the data.
    """

    def __init__(self, path: str | Path, every: int, keep: int) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} is {shown(value)}: write a whole number from 1 on")
        self._path, self._every, self._keep = _of_trial(check_path(path)), every, keep
        self._saved = 0
        self._entered = self._ending = False

    @property
    def step(self) -> int:
        return self._position.step

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @abstractmethod
    def _resume(self) -> tuple[Place, Stops, Callable[[int], object]]:
        """Take back the newest whole save, if there are saves: where the loop is then, what asks it to end, and what is
        called with each step."""

    @abstractmethod
    def _write(self, tag: str) -> None:
        """Save everything under a tag, together with the other ranks."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for what a save does beside the training."""

    def __enter__(self: _Self) -> _Self:
        self._position, self._stop, self._reach = self._resume()
        self._saved = self.step
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
            self._finish()

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
        out. In PyTorch the epoch's number goes to the sampler's ``set_epoch``, if it has that.

        Args:
            loader: A ``DataLoader``, a ``tf.data.Dataset``, or anything that gives the same batches each time it is
                gone through.
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
                number = self.step
                yield batch
                self._end_step()
                if self.step == steps:
                    return
                if self.step != number:  # this replica has joined others, which are elsewhere
                    break
            else:
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
            self._finish()
            sys.exit(GO_ON)

    def _save(self) -> None:
        """Save the present step, if it is not saved yet."""
        if self.step != self._saved:
            self._write(f"step{self.step}")
            self._saved = self.step
