"""``smp.init`` and what scripts read of the state: ``smp.state.cfg`` and ``smp.state.module_manager``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import HashStore

from weft.compat import state as base
from weft.launch import rendezvous
from weft.torch import join
from weft.torch.session import current


class _Join:
    """Joins a job whose data-parallel groups are the original's."""

    def init(self, config: Mapping[str, Any] | None = None) -> None:
        join.enter(config, dp_has_tp=True)

    def shutdown(self) -> None:
        join.shutdown()


class State(base.State):
    """``smp.state`` for PyTorch."""

    def init(self, config: Mapping[str, Any] | None = None) -> None:
        super().init(config)
        session = current.session()
        # One process alone has PyTorch's default group as well: scripts call torch.distributed after init.
        rendezvous.init_process_group(session.place, HashStore(), "gloo", session.timeout)


state = State(_Join())


def init(config: Mapping[str, Any] | None = None) -> None:
    state.init(config)


init.__doc__ = base.State.init.__doc__
