"""``checkpoints``: a loop of steps that saves as it goes on, and goes on where it was when the script starts again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.agree import ask_first, check_same_call, choose, gather_faults
from weft.checkpoint.find import Found, saves
from weft.checkpoint.loop import RUN, Place
from weft.checkpoint.stop import Stop
from weft.errors import CheckpointError, UsageError
from weft.tensorflow.checkpoint.contents import FRAMEWORK, Contents, model_of
from weft.tensorflow.checkpoint.fit import InFit
from weft.tensorflow.checkpoint.position import Position
from weft.tensorflow.checkpoint.restore import AllRanks, restore
from weft.tensorflow.checkpoint.save import finish_checkpoint, save
from weft.tensorflow.session.session import Session, session

CALL = "weft.checkpoints"


def checkpoints(
    path: str | Path,
    every: int,
    *,
    keep: int = 2,
    model: Any = None,
    optimizer: Any = None,
    also: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> Run:
    """A run of steps that saves itself, and goes on from its newest save; every rank uses it alike.

    Use it as a context, and take the steps of the loop from it:

        with weft.checkpoints("runs/a", every=100, optimizer=optimizer) as run:
            for x, y in run.batches(dataset, epochs=3):
                ...

    Or hand it to Keras's own loop:

        model.fit(dataset, epochs=3, callbacks=[weft.checkpoints("runs/a", every=100)])

    Args:
        path: The folder of the saves, on a disk that all hosts share; one for each run.
        every: After how many steps the run is saved. The last step is saved too.
        keep: So many saves are kept.
        model: The model; not needed when there is one only. Its variables exist: build it before.
        optimizer: Its optimizer; not needed when the model was compiled with one.
        also: Further models, optimizers, metrics and variables, by names of your choice. Of variables the first
            rank's count.
        asynchronous: Whether saves are written beside the training.

    Raises:
        UsageError: A value is wrong, here or on entering.
        CheckpointError: On entering: there are saves, but none that is whole.
    """
    if RUN in (also or {}):
        raise UsageError(f"also[{RUN!r}] is taken: the run keeps its own position there; choose another name")
    wrong = sorted({"model", "optimizer"} & set(also or {}))
    if wrong:
        raise UsageError(f"also[{wrong[0]!r}] is taken: pass {wrong[0]}= or choose another name")
    return Run(path, every, keep, model, optimizer, also or {}, asynchronous)


class Run(InFit):
    """The loop of :func:`checkpoints`."""

    def __init__(
        self, path: str | Path, every: int, keep: int, model: Any, optimizer: Any, also: Mapping[str, Any],
        asynchronous: bool,
    ) -> None:  # fmt: skip
        super().__init__(path, every, keep)
        self._given, self._optimizer, self._also, self._asynchronous = model, optimizer, also, asynchronous

    def _resume(self) -> tuple[Place, Stop, Callable[[int], object]]:
        joined = session()
        self._contents = self._find_contents(joined)
        self._own = Position()
        ranks = AllRanks(joined)
        if ask_first(ranks, lambda: bool(saves(self._path))):
            joined.check_outside("resuming from a checkpoint")
            check_same_call(joined, CALL, None)
            found = choose(ranks, self._path, None, "full")
            own = _find_position(joined, found)
            restore(joined, found, self._contents, True, (), "full")
            self._own = own
        return self._own, Stop(joined, ranks), joined.monitor.reach

    def _find_contents(self, joined: Session) -> Contents:
        """The content to save; an error if the script has not made it yet."""
        models, given = joined.models, self._fitted if self._given is None else self._given
        if given is None and len(models) != 1:
            raise UsageError(
                f"there are {len(models)} models: say which one with model=, and name the others in also"
                if models
                else "there is no model yet: make the DistributedModel before weft.checkpoints is entered"
            )
        model = models[0] if given is None else model_of(given)
        if model is None:
            raise UsageError(f"model is a {type(given).__qualname__}: pass the DistributedModel")
        optimizer = getattr(model, "optimizer", None) if self._optimizer is None else self._optimizer
        if optimizer is None:
            raise UsageError("the model was compiled with no optimizer: pass optimizer= to weft.checkpoints")
        if not model.all_variables():
            raise UsageError(
                "the model has no variables yet: give its first layer an input shape, or call it, before "
                "weft.checkpoints is entered"
            )
        return Contents.of({"model": model, "optimizer": optimizer, **self._also})

    def _write(self, tag: str) -> None:
        self._note_metrics()
        save(
            self._path, tag, self._contents, {"step": self.step}, self._keep, "keep",
            {RUN: self._own.to_json()}, self._asynchronous,
        )  # fmt: skip

    def _finish(self) -> None:
        finish_checkpoint()


def _find_position(joined: Session, found: Found) -> Position:
    """The position that the rank at this place of the mesh had stored, or the nearest one, whose random states are
    not taken.

    Raises:
        CheckpointError: On every rank: it cannot be read, or the save is of something else.
    """
    assert found.index is not None
    position, faults = Position(), []
    if found.index.content.get("framework") == FRAMEWORK:  # else what is to come says so
        try:
            position = _read_position(joined, found.index.content.get("ranks"))
        except CheckpointError as error:
            faults = [f"{found.folder}: {error}"]
    faults = gather_faults(AllRanks(joined), faults)
    if faults:
        raise CheckpointError("; ".join(faults))
    return position


def _read_position(joined: Session, ranks: Any) -> Position:
    places = {
        (each.get("pp"), each.get("rdp")): each["run"]
        for each in (ranks.values() if isinstance(ranks, dict) else ())
        if isinstance(each, dict) and "run" in each
    }
    here, copy = joined.position("pp"), joined.position("rdp")
    nearest = next((place for place in ((here, copy), (here, 0), (0, 0)) if place in places), None)
    if nearest is None:
        raise CheckpointError("it was not saved by weft.checkpoints: give the run a folder of its own")
    return Position.of_json(places[nearest], nearest == (here, copy))
