"""Views of a running job: the line of progress, and the values that the script says."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from weft.runtime import allocator
from weft.runtime.allocator import resident_bytes
from weft.session.watching import log_values
from weft.timeline import Span
from weft.torch.output import StepOutput
from weft.torch.session.session import Session
from weft.torch.tensors.pytree import nodes_with_paths
from weft.watch.progress import Ranks


def after_step(session: Session, samples: int | None, results: Any) -> None:
    """Show how a step of training was: each rank to the others, the first one to people."""
    if session.executor is not None:
        session.monitor.measure(_idle(session.executor.spans), memory_bytes(session))
    if session.views.progress is not None:
        session.views.progress.step(
            (samples or 0) * session.mesh.rdp, lambda: _ranks(session), lambda: _loss(results)
        )


def _idle(spans: Sequence[Span]) -> float:
    """The share of a rank's last step in which it ran nothing."""
    took_s = max((span.end_s for span in spans), default=0.0) - min(
        (span.start_s for span in spans), default=0.0
    )
    return max(0.0, 1.0 - sum(span.end_s - span.start_s for span in spans) / took_s) if took_s else 0.0


def memory_bytes(session: Session) -> int:
    """Bytes in use: of the process on a CPU now, of the device on a GPU at most."""
    if session.device.type == "cuda":
        return torch.cuda.max_memory_allocated(session.device)
    return resident_bytes()


def peak_bytes(session: Session) -> int:
    """The most that was in use, on a CPU since the last call."""
    return memory_bytes(session) if session.device.type == "cuda" else allocator.peak_bytes()


def _ranks(session: Session) -> Ranks:
    """The state of the first pipeline's ranks."""
    if session.executor is None:
        return Ranks((), memory_bytes(session))
    signs = session.monitor.signs()
    found = [signs[rank] for rank in session.peers("pp") if rank in signs]
    return Ranks([sign.idle for sign in found], max((sign.memory_bytes for sign in found), default=0))


def _loss(results: Any) -> float | None:
    """The first scalar that a step returns."""
    for _, node in nodes_with_paths(results, "", (list, tuple, Mapping)):
        if (
            isinstance(node, StepOutput)
            and node.outputs[0].dim() == 0
            and node.outputs[0].is_floating_point()
        ):
            return float(node.reduce_mean())
    return None


def open_board(folder: str) -> Any:
    """A writer for TensorBoard."""
    if "tensorflow" not in sys.modules:
        # Where TensorFlow is installed TensorBoard would import it to write files: seconds, and 600 MB.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


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
    log_values(values, step, open_board)
