"""``checkpoints``: a loop of steps that saves as it goes on, and goes on where it was when the script starts again.

A save has where the run is in its data: the step, the epoch, the batch in it, and what decided the epoch's order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Generator

from weft.checkpoint.agree import ask_first
from weft.checkpoint.find import saves
from weft.checkpoint.loop import RUN, Loop, Place
from weft.checkpoint.stop import Stop, Stops, StopTogether
from weft.errors import UsageError
from weft.torch.checkpoint import named_state
from weft.torch.checkpoint.hand_over import HandOver
from weft.torch.checkpoint.resume import only_model, resume_from_checkpoint
from weft.torch.checkpoint.save import finish_checkpoint, save_checkpoint
from weft.torch.model import DistributedModel
from weft.torch.session import current
from weft.torch.session.collectives import AllRanks
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, Streams


class Position:
    """An object among those of a save.

    The order of a shuffled epoch follows from the random states at its beginning. They are kept, so that the epoch can
    begin in the same way again.

    Attributes:
        step: How many steps have begun.
        epoch: How many epochs are over.
        batch: How many batches of this epoch were drawn.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.step = self.epoch = self.batch = 0
        self._random: Any = None
        self._generators: list[Any] = []
        self._now: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step, "epoch": self.epoch, "batch": self.batch,
            "random": self._random, "generators": self._generators,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.epoch, self.batch = (int(state[name]) for name in ("step", "epoch", "batch"))
        self._random, self._generators = state["random"], list(state["generators"])

    def resume(self) -> None:
        """Keep the random states that came back, for the loop: the script may draw before it."""
        self._now = self._capture()

    def begin(self) -> None:
        """The loop begins."""
        if self._now is not None:
            self._streams.restore(self._now)
            self._now = None

    def open(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of the present epoch that were not drawn yet."""
        for sampler in _samplers(loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        generators = _generators(loader)
        if not self.batch:
            self._random = self._capture()
            self._generators = [generator.get_state() for generator in generators]
            return iter(loader)
        if len(generators) != len(self._generators):
            raise UsageError(
                f"the loader has {len(generators)} random generators of its own, that of the save had "
                f"{len(self._generators)}: make it as it was, or begin with another folder"
            )
        now = self._capture()
        self._streams.restore(self._random)
        for generator, state in zip(generators, self._generators, strict=True):
            generator.set_state(state)
        batches = iter(loader)
        for _ in range(self.batch):
            next(batches, None)
        self._streams.restore(now)
        return batches

    def end_epoch(self) -> None:
        """All batches of the epoch were drawn."""
        self.epoch, self.batch = self.epoch + 1, 0

    def _capture(self) -> Any:
        """The random states of this process."""
        return self._streams.capture(TORCH | PYTHON | (NUMPY if "numpy.random" in sys.modules else 0))


def _samplers(loader: Any) -> list[Any]:
    """The samplers that decide the order of a ``DataLoader``."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def _generators(loader: Any) -> list[Generator]:
    """The random generators of a ``DataLoader`` and its samplers, apart from the process's own."""
    found = [getattr(owner, "generator", None) for owner in (loader, *_samplers(loader))]
    return list({id(each): each for each in found if isinstance(each, Generator)}.values())


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

    def _resume(self) -> tuple[Place, Stops, Callable[[int], object]]:
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
        rejoin = session.rejoin
        if rejoin is not None:
            optimizers = named_state.list_of(self._optimizer)
            rejoin.keep(HandOver(session, self._model, optimizers, self._also))
        if not (rejoin and rejoin.joins) and ask_first(ranks, lambda: bool(saves(self._path))):
            resume_from_checkpoint(
                self._path, model=self._model, optimizer=self._optimizer, also=self._also,
                allow_pickle=self._allow_pickle,
            )  # fmt: skip
            position.resume()
        stop = Stop(session, AllRanks(session, "the end of a step"))
        return position, stop if rejoin is None else StopTogether(stop, rejoin), session.monitor.reach

    def _write(self, tag: str) -> None:
        if (rejoin := current.session().rejoin) is not None and not rejoin.saves:
            return
        save_checkpoint(
            self._path, tag, model=self._model, optimizer=self._optimizer,
            user_content={"step": self.step}, num_kept_partial_checkpoints=self._keep,
            also=self._also, asynchronous=self._asynchronous, allow_pickle=self._allow_pickle,
        )  # fmt: skip

    def _finish(self) -> None:
        finish_checkpoint()
