"""Replicas that may be lost and come back: each is a job of its own, and meets the others at the end of its steps.

With ``min_replicas`` the ranks of a replica know nothing of other replicas but what is here. So a rank that dies takes
its own replica with it, and no other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from weft.errors import UsageError
from weft.reduce.meeting import Meeting, Payload
from weft.reduce.members import Table
from weft.session.recording import record
from weft.torch.session.session import Session

OTHERS = "the other replicas"


class State(Protocol):
    """The state that a replica that joins gets from another one, beside averages."""

    def give(self, write: Callable[[memoryview], None]) -> None:
        """Write the state of this rank, part by part."""

    def take(self, content: bytearray) -> None:
        """Put the state of another replica's rank in the place of this one's."""


class Rejoin:
    """This rank's replica among the others.

    Args:
        address: Where the launcher keeps who is there.
        session: This rank's, which is that of its replica alone.

    Attributes:
        replica: The number of this replica.
        replicas: How many there are when none is lost.
        asked: Whether the job was asked to end; the same on all ranks after each step.
        saves: Whether this replica saves.
        counted: The replicas whose samples the last step has averaged.
    """

    def __init__(self, address: str, session: Session) -> None:
        table, self.replica, start = Table.open(address)
        self.replicas = table.replicas
        self.asked, self.saves, self.counted = False, self.replica == 0, tuple(range(table.replicas))
        self._begun = False
        self._state: State | None = None
        self._table = table

        def note() -> None:
            session.monitor.note("collective", session.steps, None, OTHERS)

        self._meeting = Meeting(table, self.replica, start, session.rank, note)

    @property
    def joins(self) -> bool:
        """True if the others have begun without this replica, which will get their state."""
        return self._meeting.joins

    def keep(self, state: State) -> None:
        """Give this to replicas that join."""
        self._state = state

    def share_plan(self, make: Callable[[], str]) -> str:
        """The plan of the first replica that makes one."""
        return self._table.share_text(make)

    def begin_step(self, session: Session) -> None:
        """Before the first step all replicas get the parameters and buffers of the first one."""
        if self._begun:
            return
        if len(session.models) != 1 or self._state is None:
            raise UsageError(
                "min_replicas needs one DistributedModel, and steps in a loop of weft.checkpoints: only that knows at "
                "which batch a replica goes on that has joined again"
            )
        # whatever cannot travel is an error now, not when another replica needs it
        self._state.give(lambda part: None)
        (model,) = session.models
        if not self._meeting.joins:
            tensors = [p for _, p in model.reduced_parameters()] + list(model.local_buffers())
            with session.doing(OTHERS):
                self._meeting.begin([tensor.detach() for tensor in tensors])
        self._begun = True

    def finish_step(self, session: Session, trained: bool) -> None:
        """Average the gradients over the replicas that are there; those that join get the others' state."""
        if not trained:
            return
        while not self._meet(session):
            pass

    @torch.no_grad()
    def _meet(self, session: Session) -> bool:
        (model,) = session.models
        parameters = [p for _, p in model.reduced_parameters() if p.requires_grad]
        if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters):
            raise UsageError("min_replicas averages dense gradients only: make embeddings with sparse=False")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)
        buffers = [buffer.detach() for buffer in model.local_buffers()] if model.broadcasts_buffers else []
        payload = Payload([*grads, present], buffers, session.agreement.to_compare())
        with session.doing(OTHERS), record(session, "reduce"):
            outcome = self._meeting.average(payload, bool(session.monitor.course.asked))
            assert self._state is not None
            joined = self._meeting.hand_over(outcome, payload, self._state.give, self._state.take)
        if not joined:
            return False
        for parameter, grad, found in zip(parameters, grads, present.tolist(), strict=True):
            if parameter.grad is None and found:
                parameter.grad = grad
        if len(outcome.counted) < len(outcome.members):
            session.agreement.forget_loads()
        self.asked, self.saves, self.counted = outcome.asked, outcome.saver == self.replica, outcome.counted
        return True
