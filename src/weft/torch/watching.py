"""What people see while a job runs: the line of progress, and the values that the script says."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.foreign import shown, shown_path
from weft.runtime.allocator import resident_bytes
from weft.session.recording import record_outermost
from weft.timeline import Span
from weft.torch.output import StepOutput
from weft.torch.session import current
from weft.torch.session.session import Session
from weft.watch.progress import VARIABLE, Ranks, on_stderr
from weft.watch.values import ValueFile

_Item = TypeVar("_Item")
_log = logging.getLogger("weft")


def after_step(session: Session, samples: int | None, results: Any) -> None:
    """Show how a step of training was: each rank to the others, the first one to people."""
    if session.executor is not None:
        session.monitor.measure(_idle(session.executor.spans), memory_bytes(session))
    if session.progress is not None:
        session.progress.step(
            (samples or 0) * session.mesh.rdp, lambda: _ranks(session), lambda: _loss(results)
        )


def _idle(spans: Sequence[Span]) -> float:
    """The share of a rank's last step in which it ran nothing."""
    took_s = max((span.end_s for span in spans), default=0.0) - min(
        (span.start_s for span in spans), default=0.0
    )
    return max(0.0, 1.0 - sum(span.end_s - span.start_s for span in spans) / took_s) if took_s else 0.0


def memory_bytes(session: Session) -> int:
    """The most that was in use: of the process on a CPU, of the device on a GPU."""
    if session.device.type == "cuda":
        return torch.cuda.max_memory_allocated(session.device)
    return resident_bytes()


def _ranks(session: Session) -> Ranks:
    """What the ranks of the first pipeline show."""
    if session.executor is None:
        return Ranks((), memory_bytes(session))
    signs = session.monitor.signs()
    found = [signs[rank] for rank in session.peers("pp") if rank in signs]
    return Ranks([sign.idle for sign in found], max((sign.memory_bytes for sign in found), default=0))


def _loss(results: Any) -> float | None:
    """The first scalar that a step returns."""
    if isinstance(results, StepOutput):
        first = results.outputs[0]
        return float(results.reduce_mean()) if first.dim() == 0 and first.is_floating_point() else None
    if isinstance(results, Mapping):
        results = list(results.values())
    for each in results if isinstance(results, (list, tuple)) else ():
        found = _loss(each)
        if found is not None:
            return found
    return None


def progress(iterable: Iterable[_Item] | None = None, *, total: int | None = None) -> Iterable[_Item]:
    """The same items, while the first rank shows how far the loop is, how fast, and who waits.

    ``total``: how many items there are, where the iterable does not say. Without an iterable this only tells the line
    how many steps come. Under ``weft run --quiet`` nothing is shown.

    >>> list(progress([1, 2, 3]))
    [1, 2, 3]
    """
    if iterable is not None and total is None and isinstance(iterable, Sized):
        total = len(iterable)
    session = current.session() if current.is_initialized() else None
    if session is not None and session.rank == 0:
        if session.progress is None and VARIABLE not in os.environ:
            session.show_progress(on_stderr("terminal" if sys.stderr.isatty() else "plain"))
        if session.progress is not None:
            session.progress.begin(total)
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
            if session is not None and session.progress is not None and session.steps == before:
                session.progress.step()
    finally:  # a loop may be left early
        if session is not None and session.progress is not None:
            session.progress.close()


class Log:
    """Where values of the script go: a file always; TensorBoard and Weights & Biases where they are."""

    def __init__(self, folder: str, tensorboard: str = "") -> None:
        installed = importlib.util.find_spec("tensorboard") is not None
        if tensorboard and not installed:
            raise UsageError(
                f"values cannot go to {shown_path(tensorboard)} for TensorBoard, which is not installed: pip install "
                "'weft[tensorboard]', or leave out --tensorboard and the setting tensorboard"
            )
        self.file = ValueFile(folder)
        self.board: Any = None
        if installed:
            if "tensorflow" not in sys.modules:
                # Where TensorFlow is installed TensorBoard would import it to write files: seconds, and 600 MB.
                sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
            from torch.utils.tensorboard import SummaryWriter

            name = self.file.path.with_suffix("")
            self.board = SummaryWriter(str(Path(tensorboard) / name.name if tensorboard else name))
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


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Keep values of the script: in a JSON lines file in ``log_dir``, and in the line of progress.

    The first rank writes; the others may call it, too. TensorBoard has them where it is installed, Weights & Biases
    where the script has called ``wandb.init``.

    Args:
        values: Numbers, texts, tensors with one element, and what steps return, by name.
        step: Their step; left out, how many steps of training there were.

    Raises:
        UsageError: A value is none of these, or the folder cannot be written to.
    """
    session = current.session()
    plain = {str(name): _plain(str(name), value) for name, value in values.items()}
    if session.recorder is not None:
        session.recorder.note(plain)
    if session.rank:
        return
    if session.values is None:
        session.log_to(Log(session.settings.log_dir, session.settings.tensorboard))
    assert session.values is not None
    session.values.add(session.steps - session.evaluations if step is None else step, plain)
    if session.progress is not None:
        session.progress.note({name: value for name, value in plain.items() if not isinstance(value, str)})


def _plain(name: str, value: Any) -> float | str:
    if isinstance(value, StepOutput):
        value = value.reduce_mean()
    if isinstance(value, Tensor) or hasattr(value, "item"):
        if getattr(value, "size", 1) != 1 and (not isinstance(value, Tensor) or value.numel() != 1):
            raise UsageError(f"{name} has {list(value.shape)} elements: log a number, its mean() say")
        value = value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"{name} is {shown(value)}: log numbers, texts and tensors with one element")


__all__ = ["Log", "after_step", "log", "progress"]
