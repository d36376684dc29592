"""A framework's answers about objects that go from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _itself(value: Any) -> Any:
    return value


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True)
class Travel:
    """A framework's share in objects that travel.

    Attributes:
        in_step: Whether a step runs on this thread, where nothing may be sent.
        refusal: What is said then, after "was called".
        is_remote: Whether a tensor has no data on this rank.
        outgoing: An object with tensors of torch in place of the framework's own.
        incoming: An object with the framework's own tensors in place of those of torch.
    """

    in_step: Callable[[], bool] = _never
    refusal: str = "inside a weft.step function: call it before or after the step"
    is_remote: Callable[[Any], bool] = _never
    outgoing: Callable[[Any], Any] = _itself
    incoming: Callable[[Any], Any] = _itself
