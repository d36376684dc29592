"""The facts of a rank: `rank<N>.facts.json`, written when the rank joins, and again when the models are split."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.analysis.run import Facts, Unit
from weft.document import Document
from weft.errors import UsageError
from weft.plan.measured.planned import Planned
from weft.profiler.clock import Clock
from weft.untrusted import MOST_RANKS, read_file, shown_path

SUFFIX = ".facts.json"
VERSION = 1


def facts_path(folder: Path, rank: int) -> Path:
    """The file of a rank in the folder of a recording."""
    return folder / f"rank{rank}{SUFFIX}"


def write_facts(folder: Path, facts: Facts, clock: Clock) -> None:
    """Write them in one piece, whatever was there.

    Raises:
        UsageError: The folder cannot be written to.
    """
    path = facts_path(folder, facts.rank)
    content = {"weft": "facts", "version": VERSION, **clock.to_record(), "facts": asdict(facts)}
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        raise UsageError(
            f"{shown_path(path)} cannot be written: {error.strerror}; record into another folder"
        ) from error


def read_facts(path: Path) -> tuple[Facts, Clock]:
    """The facts that `write_facts` wrote, and the rank's clock.

    Raises:
        FormatError: It cannot be read; the error names the fault by its path.
    """

    def parse(text: str) -> tuple[Facts, Clock]:
        document = Document.parse(text, kind="facts", version=VERSION)
        return _facts(document["facts"]), Clock.from_record(document.value, path)  # type: ignore[arg-type]

    return read_file(path, parse)


def _facts(document: Document) -> Facts:
    rank, ranks = document["rank"], document["ranks"].whole()
    if not 0 <= rank.whole() < ranks <= MOST_RANKS:
        rank.refuse(f"a rank below {ranks}")
    return Facts(
        rank.whole(), ranks, document["host"].text(), document["pid"].whole(), document["pp_rank"].whole(),
        document["rdp_rank"].whole(), document["device"].text(), document["start_s"].number(),
        document["joined_s"].number(), document["limit_bytes"].whole(), document["cores"].whole(),
        _mapping(document["settings"]), tuple(map(_unit, document["units"])),
        {name: str(value) for name, value in _mapping(document["versions"]).items()},
        document["base_bytes"].whole() if "base_bytes" in document else 0, _planned(document),
    )  # fmt: skip


def _planned(document: Document) -> Planned | None:
    """The plan; none in earlier files, and before there is one."""
    if "planned" not in document or document["planned"].value is None:
        return None
    return Planned.from_document(document["planned"])


def _unit(document: Document) -> Unit:
    return Unit(
        document["name"].text(), document["partition"].whole(), document["forward_s"].number(),
        document["backward_s"].number(), document["parameter_bytes"].whole(),
    )  # fmt: skip


def _mapping(document: Document) -> Mapping[str, Any]:
    if not isinstance(document.value, dict):
        document.refuse("an object")
    return document.value


def process_start_s() -> float:
    """When this process began, on the clock of `time.perf_counter`; now where the system does not say."""
    now = time.perf_counter()
    with suppress(OSError, ValueError, AttributeError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return now - max(0.0, age_s)
    return now
