"""What the workers of this folder have in common: arguments, and one JSON line for each item and rank."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# What an item gives back: the faults (none: all is well) and more fields for its line.
RunItem = Callable[[str, int], "tuple[str, dict[str, Any]]"]


class BeforeSplit(Exception):
    """An item failed before its ranks had anything to do with each other: the next one can run."""


def arguments(known: Sequence[str]) -> argparse.Namespace:
    """`[--partitions n] [--results folder] item...`; no item means all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--partitions", type=int, default=2, help="ranks of the job")
    parser.add_argument("--results", type=Path, help="folder for the lines, beside printing them")
    parser.add_argument("items", nargs="*")
    given = parser.parse_args()
    unknown = [item for item in given.items if item not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    given.items = given.items or list(known)
    return given


def begin_torch(partitions: int) -> int:
    """This rank's number, when weft is initialised for PyTorch."""
    import torch

    import weft.torch as weft

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    weft.init({"partitions": partitions})
    return weft.rank()


def work(given: argparse.Namespace, run_item: RunItem, begin: Callable[[int], int] = begin_torch) -> None:
    """Runs all items. An exception ends the job after its line: the other ranks may be elsewhere by then."""
    rank = begin(given.partitions)
    for item in given.items:
        _write(given.results, {"case": item, "rank": rank, "began": True})
        started = time.perf_counter()
        line: dict[str, Any] = {"case": item, "rank": rank, "ok": False, "error": ""}
        try:
            line["error"], more = run_item(item, given.partitions)
            line.update(more, ok=not line["error"])
        except BeforeSplit as broken:
            line["error"] = str(broken)
        except BaseException:
            line["error"] = traceback.format_exc(limit=-12)
            raise
        finally:
            line["seconds"] = round(time.perf_counter() - started, 2)
            _write(given.results, line)
            if given.results is None:
                print(json.dumps(line), flush=True)


def _write(folder: Path | None, line: dict[str, Any]) -> None:
    if folder is not None:
        with (folder / f"rank{line['rank']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
