"""A session of one process, where a test asks for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft.torch as weft
from tests.launching import FOREIGN


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`init(**settings)` joins a job of this process alone; it is left again after the test."""
    import os

    for name in os.environ:
        if name.startswith(FOREIGN):
            monkeypatch.delenv(name)
    state = torch.get_rng_state()

    def start(**settings: Any) -> None:
        weft.init(settings)

    yield start
    weft.shutdown()
    torch.set_rng_state(state)


@pytest.fixture
def job(init: Callable[..., None]) -> None:
    """A job of this process alone, with the settings that nobody set."""
    init()
