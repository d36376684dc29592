"""The values that a script of TensorFlow says while its job runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.session.watching import log_values


def open_board(folder: str) -> Any:
    """A writer for TensorBoard: that of PyTorch, which carries the messages."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Keep values of the script: in a JSON lines file in ``log_dir``, and in the line of progress.

    The first rank writes; the others may call it, too. TensorBoard has them where it is installed, Weights & Biases
    where the script has called ``wandb.init``. Call it outside of a ``tf.function``, where tensors have values.

    Args:
        values: Numbers, texts, tensors with one element, and what steps return, by name.
        step: Their step; left out, how many steps of training there were.

    Raises:
        UsageError: A value is none of these, or the folder cannot be written to.
    """
    log_values(values, step, open_board)
