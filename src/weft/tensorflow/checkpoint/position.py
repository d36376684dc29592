"""Where a run of steps is in its data, and the random states of its process."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from weft.errors import CheckpointError
from weft.tensorflow import private
from weft.tensorflow.checkpoint import user_values
from weft.untrusted import translated


class Position:
    """The place of a loop, and the states that it goes on with.

    Attributes:
        step: How many steps have begun.
        epoch: How many epochs are over.
        batch: How many batches of this epoch were drawn.
        metrics: What the metrics of ``fit`` have counted in this epoch, by variable; None elsewhere.
        over: Whether ``fit`` was stopped for good.
        length: How many batches the last epoch had.
    """

    def __init__(self) -> None:
        self.step = self.epoch = self.batch = 0
        self.metrics: list[bytes] | None = None
        self.over = False
        self.length = 0
        self._random: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None
        self._opened: Any = None

    def to_json(self) -> Any:
        """All of it, for a save."""
        return user_values.encode(
            {
                "step": self.step, "epoch": self.epoch, "batch": self.batch,
                "begun": self._random, "random": capture(), "metrics": self.metrics, "over": self.over,
                "length": self.length,
            },
            {},
        )  # fmt: skip

    @classmethod
    def of_json(cls, saved: Any, random_states: bool) -> Position:
        """The position that :meth:`to_json` gave. ``random_states``: whether those come back too, when the loop begins.

        Raises:
            CheckpointError: It is not as :meth:`to_json` writes it.
        """
        position = cls()
        with translated("the position in the save cannot be read", CheckpointError, "do not use it"):
            content = user_values.decode(saved, _no_tensor)
            position.step, position.epoch, position.batch = (
                _count(content[name]) for name in ("step", "epoch", "batch")
            )
            position.metrics, position.over = _fit_of(content)
            position.length = _count(content.get("length", 0))
            for states in (content["begun"], content["random"]):
                if states is not None:
                    check(states)
            if random_states:
                position._random, position._now = content["begun"], content["random"]
        return position

    def begin(self) -> None:
        """The loop begins: the random states are those of the save."""
        if self._now is not None:
            restore(self._now)
            self._now = None

    def open(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of the present epoch that were not drawn yet.

        A ``tf.data.Dataset`` draws the seeds of an epoch when the epoch begins. One that is new in this process begins
        as many epochs as are over.
        """
        if self._opened is not loader and isinstance(loader, tf.data.Dataset):
            for _ in range(self.epoch):
                iter(loader)
        self._opened = loader
        if not self.batch:
            self.begin_epoch()
            return iter(loader)
        now = capture()
        self.reopen()
        batches = iter(loader)
        for _ in range(self.batch):
            next(batches, None)
        restore(now)
        return batches

    def begin_epoch(self) -> None:
        """The present epoch begins: its random states are kept, to draw the same batches again."""
        self._random = capture()

    def reopen(self) -> None:
        """The present epoch begins again: with the random states that it had begun with."""
        if self._random is not None:
            restore(self._random)

    def end_epoch(self) -> None:
        """All batches of the epoch were drawn."""
        self.epoch, self.batch, self.length = self.epoch + 1, 0, self.batch


def capture() -> dict[str, Any]:
    """The random states of Python, NumPy, TensorFlow and Keras in this process, as numbers, texts and bytes."""
    eager = private.eager_seeds()
    name, words, *rest = np.random.get_state()
    return {
        "python": _packed(random.getstate()),
        "numpy": [name, np.asarray(words, np.uint32).tobytes(), *rest],
        "eager": None if eager is None else _packed(eager.getstate()),
        "shared": {
            name: private.underlying(state).numpy().tolist()
            for name, state in private.shared_states().items()
        },
    }


def check(states: Mapping[str, Any]) -> None:
    """Some error if these are no states of :func:`capture`."""
    random.Random().setstate(_unpacked(states["python"]))
    np.random.RandomState().set_state(_of_numpy(states["numpy"]))
    if states["eager"] is not None:
        random.Random().setstate(_unpacked(states["eager"]))
    for name, state in states["shared"].items():
        if name not in ("generator", "keras") or not all(type(word) is int for word in state):
            raise ValueError("no random state of TensorFlow")


def restore(states: Mapping[str, Any]) -> None:
    """Set the random states."""
    for name, state in states["shared"].items():
        variable = private.underlying(private.make_shared_state(name))
        variable.assign(tf.constant(state, variable.dtype, variable.shape))
    eager = private.eager_seeds()
    if eager is not None and states["eager"] is not None:
        eager.setstate(_unpacked(states["eager"]))
    np.random.set_state(_of_numpy(states["numpy"]))
    random.setstate(_unpacked(states["python"]))


def _packed(state: Any) -> list[Any]:
    """A state of Python's ``Random``."""
    version, words, gauss = state
    return [version, np.asarray(words, np.uint32).tobytes(), gauss]


def _unpacked(saved: Any) -> Any:
    version, words, gauss = saved
    return version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss


def _of_numpy(saved: Any) -> Any:
    name, words, *rest = saved
    return (name, np.frombuffer(words, np.uint32), *rest)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no number of steps")
    return value


def _fit_of(content: Mapping[str, Any]) -> tuple[list[bytes] | None, bool]:
    """The metrics that ``fit`` has stored beside the place, and True if the fit is over."""
    metrics, over = content.get("metrics"), content.get("over", False)
    if metrics is not None and not all(type(each) is bytes for each in metrics):
        raise ValueError("no values of metrics")
    if type(over) is not bool:
        raise ValueError("no end of fit")
    return metrics, over


def _no_tensor(path: str) -> Any:
    raise ValueError("tensors where there are none")
