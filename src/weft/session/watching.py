"""The views of a running job of any framework: the line of progress, and the values that the script says."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import UsageError
from weft.schedule.table import KINDS
from weft.session import current
from weft.session.recording import record_outermost
from weft.session.session import Session
from weft.untrusted import shown, shown_path
from weft.watch.progress import VARIABLE, ValueFile, on_stderr

_Item = TypeVar("_Item")
_log = logging.getLogger("weft")
OPENING = "WEFT_OPENING"
"""Variable: off, and there is no line at the start, under launchers that have no `--quiet`."""


def show_opening(session: Session, microbatches: int) -> None:
    """After the first step: the first rank says on standard error what was split, how, and what the step has proved.

    ``microbatches``: into how many the step was cut.
    """
    opening = session.views.opening
    if opening.shown:
        return
    opening.shown = True
    quiet = "off" in (os.environ.get(VARIABLE), os.environ.get(OPENING))
    if session.rank or session.place.world_size == 1 or quiet:
        return
    print(f"weft: {opening.text(*describe_layout(session, microbatches))}", file=sys.stderr, flush=True)


def describe_layout(session: Session, microbatches: int) -> tuple[str, int, list[str]]:
    """The name of the schedule, the number of microbatches, and what else ranks share, in words."""
    settings = session.settings
    schedule = settings.pipeline if session.decided.chosen is None else session.decided.chosen.schedule.name
    degrees = {
        "{} data-parallel replicas": session.mesh.rdp,
        "parameters sharded over {} replicas": settings.sharded_data_parallel_degree,
        "tensor parallel over {} ranks": settings.tensor_parallel_degree,
        "experts shared by {} replicas": settings.expert_parallel_degree,
        "context parallel over {} ranks": settings.context_parallel_degree,
    }
    ways = [text.format(degree) for text, degree in degrees.items() if degree > 1]
    return KINDS[schedule].title, microbatches, ways


def progress(iterable: Iterable[_Item] | None = None, *, total: int | None = None) -> Iterable[_Item]:
    """The same items, while the first rank shows how far the loop is, how fast, and who waits.

    ``total``: how many items there are, where the iterable does not say. Without an iterable this only gives the line
    how many steps come. Under ``weft run --quiet`` nothing is shown.

    >>> list(progress([1, 2, 3]))
    [1, 2, 3]
    """
    if iterable is not None and total is None and isinstance(iterable, Sized):
        total = len(iterable)
    session = current.session() if current.is_initialized() else None
    if session is not None and session.rank == 0:
        views = session.views
        if views.progress is None and VARIABLE not in os.environ:
            views.progress = on_stderr("terminal" if sys.stderr.isatty() else "plain")
        if views.progress is not None:
            views.progress.begin(total)
    return () if iterable is None else _through(session, iterable)


def _through(session: Session | None, iterable: Iterable[_Item]) -> Iterator[_Item]:
    """Items; where no step is called meanwhile, each counts as one."""
    items = iter(iterable)
    try:
        while True:
            with nullcontext() if session is None else record_outermost(session, "data"):
                try:
                    item = next(items)
                except StopIteration:
                    break
            before = None if session is None else session.steps
            yield item
            if session is not None and session.views.progress is not None and session.steps == before:
                session.views.progress.step()
    finally:  # a loop may be left early
        if session is not None and session.views.progress is not None:
            session.views.progress.close()


class Log:
    """Where values of the script go: a file always; TensorBoard and Weights & Biases where they are.

    ``open_board``: makes a writer for TensorBoard, as ``torch.utils.tensorboard`` has it, for a folder.
    """

    def __init__(self, folder: str, open_board: Callable[[str], Any], tensorboard: str = "") -> None:
        installed = importlib.util.find_spec("tensorboard") is not None
        if tensorboard and not installed:
            raise UsageError(
                f"values cannot go to {shown_path(tensorboard)} for TensorBoard, which is not installed: pip install "
                "'weft[tensorboard]', or leave out --tensorboard and the setting tensorboard"
            )
        self.file = ValueFile(folder)
        self.board: Any = None
        if installed:
            name = self.file.path.with_suffix("")
            self.board = open_board(str(Path(tensorboard) / name.name if tensorboard else name))
        _log.info("values are written to %s", self.file.path)

    def add(self, step: int, values: Mapping[str, float | str]) -> None:
        self.file.add(step, values)
        wandb = sys.modules.get("wandb")
        if wandb is not None and getattr(wandb, "run", None) is not None:
            wandb.log(dict(values), step=step)
        for name, value in values.items() if self.board is not None else ():
            if not isinstance(value, str):
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def log_values(values: Mapping[str, Any], step: int | None, open_board: Callable[[str], Any]) -> None:
    """Keep values of the script in a file, in the line of progress, and where :class:`Log` hands them.

    ``values``: numbers, texts, tensors with one element, and what steps return. ``step``: theirs; how many steps of
    training there were, if None.

    Raises:
        UsageError: A value is none of these, or the folder cannot be written to.
    """
    session = current.session()
    plain = {str(name): plain_value(str(name), value) for name, value in values.items()}
    if session.recorder is not None:
        session.recorder.note(plain)
    if session.rank or (session.rejoin is not None and not session.rejoin.saves):
        return
    views, settings = session.views, session.settings
    if views.values is None:
        views.values = Log(settings.log_dir, open_board, settings.tensorboard)
    views.values.add(session.steps - session.evaluations if step is None else step, plain)
    if views.progress is not None:
        views.progress.note({name: value for name, value in plain.items() if not isinstance(value, str)})


def plain_value(name: str, value: Any) -> float | str:
    """A number or a text from what a script logs: of a step's output its mean, of a tensor its only element.

    Raises:
        UsageError: It is nothing of these.
    """
    if hasattr(value, "reduce_mean"):
        value = value.reduce_mean()
    if hasattr(value, "numpy") and not hasattr(value, "item"):
        value = value.numpy()
    if hasattr(value, "item"):
        if prod(value.shape) != 1:
            raise UsageError(f"{name} has {list(value.shape)} elements: log a number, its mean() say")
        value = value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"{name} is {shown(value)}: log numbers, texts and tensors with one element")
