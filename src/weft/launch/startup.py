"""Ranks that were started differently fail before anything else happens.

Each rank shows named texts (its settings, its version of weft, its script). Rank 0 compares them and sends
all ranks the same verdict. So none of them goes on and waits for one that stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from weft.errors import DivergenceError, LaunchError
from weft.launch.discovery import Place

_AGREED = "agreed"
_SPARE_SECONDS = 5.0
"""How much longer than rank 0 the others wait, so that they hear what it has to say."""
_READ_SECONDS = 2.0
"""How long rank 0 waits for ranks that came to read the verdict."""
_SHOWN = 200


def agree(store: Any, place: Place, digests: Mapping[str, str], timeout: timedelta) -> None:
    """Compares `digests`, named texts, over all ranks. Call it once in the life of `store`.

    Raises:
        DivergenceError: They differ; all ranks get the same message.
        LaunchError: A rank did not show up within `timeout`.
    """
    if place.world_size == 1:
        return
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        store.set(f"digests/{place.rank}", json.dumps(dict(digests)))
        if place.rank == 0:
            store.set("digests/verdict", _collect(store, place.world_size, deadline))
        elif not _appears(store, "digests/verdict", deadline + _SPARE_SECONDS):
            raise LaunchError(f"rank {place.rank} heard nothing from rank 0 in {timeout.total_seconds():g} s")
        verdict = store.get("digests/verdict").decode()
        _read_by_all(store, place)
    except RuntimeError as error:
        raise LaunchError(f"rank {place.rank} lost rank 0 while the job was starting: {error}") from error
    kind, _, text = verdict.partition(":")
    if kind != _AGREED:
        raise (DivergenceError if kind == "diverged" else LaunchError)(text)


def _collect(store: Any, ranks: int, deadline: float) -> str:
    """Rank 0's verdict on all ranks."""
    missing = [rank for rank in range(ranks) if not _appears(store, f"digests/{rank}", deadline)]
    if missing:
        named = ", ".join(map(str, missing))
        return f"missing:{ranks - len(missing)} of {ranks} ranks started in time; missing: rank {named}"
    shown = {rank: json.loads(store.get(f"digests/{rank}")) for rank in range(ranks)}
    difference = first_difference(shown)
    return f"diverged:{difference}" if difference else _AGREED


def _read_by_all(store: Any, place: Place) -> None:
    """Rank 0, which holds the store, must not fail before the others know why."""
    count = store.add("digests/read", 1)
    deadline = time.monotonic() + _READ_SECONDS
    while place.rank == 0 and count < place.world_size and time.monotonic() < deadline:
        time.sleep(0.001)
        count = store.add("digests/read", 0)


def _appears(store: Any, key: str, deadline: float) -> bool:
    pause = 0.001
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    return True


def first_difference(shown: Mapping[int, Mapping[str, str]]) -> str:
    """The first named text in which ranks differ, and who has what; empty if there is none.

    >>> first_difference({0: {"weft": "0.1"}, 1: {"weft": "0.2"}, 2: {"weft": "0.1"}})
    'the ranks were started differently: weft is 0.1 on rank 0, 2 but 0.2 on rank 1'
    >>> first_difference({0: {"settings": '{"a": 1, "b": 2}'}, 1: {"settings": '{"a": 1, "b": 3}'}})
    'the ranks were started differently: settings.b is 2 on rank 0 but 3 on rank 1'
    """
    names = list(dict.fromkeys(name for texts in shown.values() for name in texts))
    for name in names:
        values = {rank: texts.get(name) for rank, texts in shown.items()}
        if len(set(values.values())) > 1:
            inner = _inner_difference(values)
            name, values = (f"{name}.{inner[0]}", inner[1]) if inner else (name, values)
            return f"the ranks were started differently: {name} is {_by_value(values)}"
    return ""


def _inner_difference(values: Mapping[int, str | None]) -> tuple[str, dict[int, str | None]] | None:
    """Of JSON objects, the first key that differs with its values."""
    try:
        objects = {rank: json.loads(text or "") for rank, text in values.items()}
    except ValueError:
        return None
    if not all(isinstance(value, dict) for value in objects.values()):
        return None
    for key in dict.fromkeys(key for value in objects.values() for key in value):
        inner = {
            rank: json.dumps(value[key], sort_keys=True) if key in value else None
            for rank, value in objects.items()
        }
        if len(set(inner.values())) > 1:
            return str(key), inner
    return None


def _by_value(values: Mapping[int, str | None]) -> str:
    ranks: dict[str | None, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, who in ranks.items():
        text = "missing" if value is None else value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        parts.append(f"{text} on rank {', '.join(map(str, who))}")
    return " but ".join(parts)
