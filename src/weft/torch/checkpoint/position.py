"""Where a run of steps is in its data: the step, the epoch, the batch in it, and what decided the epoch's order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Generator

from weft.errors import UsageError
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
