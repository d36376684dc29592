"""What the driver and its ranks know of a contender and of the task that all contenders have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn


class Task(Protocol):
    """What is trained. The module that defines the class names its contenders in a table `CONTENDERS`."""

    def to_text(self) -> str: ...

    @classmethod
    def from_text(cls, text: str) -> Task: ...

    def mini_batch(self) -> tuple[Any, ...]:
        """The arguments of every step."""


class Contender(ABC):
    """One way to train, built on each of its ranks after the processes know each other.

    `connect` imports and joins the ranks, `build` makes the model, whose memory counts from here on, `step`
    is what is measured: forget the old gradients, then all forward and backward passes of one mini-batch.
    """

    ranks = 2
    warm_up = 8
    """Steps between the first one and those that count: in the first ones memory is taken, and weft's joined to huge
    pages (`weft.runtime.huge_pages`: up to 0.25 s a step)."""

    def __init__(self, task: Any) -> None:
        self.task = task

    @abstractmethod
    def connect(self) -> None: ...

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def step(self, *inputs: Any) -> None: ...

    @abstractmethod
    def held_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters after the first step, under the names they have in the whole model."""

    def plan(self) -> str:
        """What it decided by itself, in words; asked after the last step."""
        return ""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
