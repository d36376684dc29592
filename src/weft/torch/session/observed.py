"""Events of PyTorch for a recording: waits for data loaders, and steps of optimizers, wrapped or not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weft.session.recording import record_outermost
from weft.session.session import Session
from weft.torch.pytorch import private


def observe(session: Session) -> list[Callable[[], None]]:
    """From now on these have spans; what is returned ends that."""
    began: dict[int, float] = {}

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        began[id(optimizer)] = time.perf_counter()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        start_s, recorder = began.pop(id(optimizer), None), session.recorder
        if start_s is not None and recorder is not None and "optimizer" not in recorder.inside:
            recorder.add("optimizer", session.steps or -1, -1, start_s, time.perf_counter())

    return [
        private.watch_loaders(lambda: record_outermost(session, "data")),
        register_optimizer_step_pre_hook(before).remove,
        register_optimizer_step_post_hook(after).remove,
    ]
