"""Callbacks of Keras that write files: the first rank of a job writes, and the others lend it their variables."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

Gathered = Callable[[], AbstractContextManager[Any]]


def _classes(*names: str) -> tuple[type, ...]:
    """Classes of callbacks, of every Keras that is imported."""
    kinds = [sys.modules[each].callbacks for each in ("keras", "tf_keras") if each in sys.modules]
    return tuple(getattr(each, name) for each in kinds for name in names)


def written_once(callbacks: Sequence[Any], first: bool, net: Any, gathered: Gathered) -> list[Any]:
    """The callbacks of a call of ``fit`` on this rank.

    Args:
        callbacks: Those of the script, the same on every rank.
        first: Whether this is the rank that writes.
        net: The whole model, whose layers have the names that files show.
        gathered: Inside, all variables of the model are on the first rank; every rank enters it at the same time.
    """
    found = []
    for each in callbacks:
        if isinstance(each, _classes("TensorBoard")):
            _show_whole(each, net, gathered)
            found.append(each if first else _Lends(each, gathered))
        elif isinstance(each, _classes("CSVLogger", "RemoteMonitor")):
            found += [each] if first else []
        else:
            if isinstance(each, keras.callbacks.BackupAndRestore) and not first:
                each._save_model = functools.partial(_join_save, each)
                each.on_train_end = _nothing
            found.append(each)
    return found


def _show_whole(board: Any, net: Any, gathered: Gathered) -> None:
    """Let histograms be those of the whole model."""
    original = type(board)._log_weights

    def show(epoch: int) -> None:
        with gathered():
            before, board._model = board._model, net
            try:
                original(board, epoch)
            finally:
                board._model = before

    board._log_weights = show


class _Lends(keras.callbacks.Callback):
    """Stands for a ``TensorBoard`` where it does not write."""

    def __init__(self, board: Any, gathered: Gathered) -> None:
        super().__init__()
        self._every, self._gathered = board.histogram_freq, gathered

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._every and epoch % self._every == 0:
            with self._gathered():
                pass


def _join_save(backup: Any) -> None:
    backup.model.save_weights(backup._weights_path, overwrite=True)


def _nothing(logs: Any = None) -> None:
    """Nothing: the first rank removes what it has written."""
