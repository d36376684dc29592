"""Who is to blame, by what ranks have left in the folder of their attempt; for launchers that hear nothing of ranks.

Nothing in the folder is believed: what is no statement counts as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from weft.errors import FormatError
from weft.launch.journal.journal import reader
from weft.terminal_text import LINES, visible
from weft.untrusted import MOST_RANKS, parse_json
from weft.watch.statement import Statement, path_of

_LONGEST_BYTES = 1 << 20
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "int": int, "str": str, "bool": bool, "float": (int, float),
}  # fmt: skip


def statements(folder: Path, ranks: int) -> list[Statement]:
    """The statements that the ranks of an attempt have left."""
    found = (_statement(folder, rank) for rank in range(min(ranks, MOST_RANKS)))
    return [each for each in found if each is not None]


def failure(folder: Path, ranks: int, code: int) -> dict[str, Any]:
    """The failure of an attempt, as ``failure.json`` has it. ``rank`` is None where no rank said anything.

    Whoever failed itself comes first, then whoever was seen to be gone, then those that only lost a connection.
    """
    said = sorted(statements(folder, ranks), key=lambda each: (each.victim, each.by != each.rank, each.time))
    if not said:
        text = f"it ended with exit code {code}, and no rank said why: see what it wrote"
        return {"rank": None, "headline": text, "details": "", "others": "", "code": code, "kind": "ended"}
    first = said[0]
    others = [
        f"rank {each.by} then lost its connection" if each.victim else f"also, {each.headline}"
        for each in said[1:]
        if each.rank != first.rank
    ]
    host = first.host if first.by == first.rank else ""
    return {
        "rank": first.rank, "host": host, "headline": first.headline, "details": first.details,
        "others": "\n".join(others), "code": code, "kind": first.kind,
    }  # fmt: skip


def _statement(folder: Path, rank: int) -> Statement | None:
    with suppress(OSError, ValueError, FormatError), reader(path_of(folder, rank)) as file:
        values = parse_json(file.read(_LONGEST_BYTES).decode())
        if not isinstance(values, Mapping):
            return None
        fits = all(isinstance(values.get(each.name), _KINDS[str(each.type)]) for each in fields(Statement))
        if fits and values["by"] == rank:
            return Statement(
                rank, values["rank"], visible(values["headline"]), visible(values["details"], LINES),
                visible(values["kind"]), values["victim"], values["time"], visible(values["host"]),
            )  # fmt: skip
    return None
