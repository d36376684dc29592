"""Why a job ended, kept in the folder of its recording: `failed.json`.

The launcher writes it, or where no launcher of weft's runs the rank that failed.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from weft.analysis.run import Failed
from weft.document import Document
from weft.terminal_text import visible
from weft.untrusted import read_file
from weft.watch.progress_file import write

NAME = "failed.json"
VERSION = 1


def leave(folder: Path, failed: Failed) -> None:
    """Write it, if that can be done."""
    write(folder, {"weft": "failed", "version": VERSION, **asdict(failed)}, NAME)


def forget(folder: Path) -> None:
    """Another job records into the folder, or this one was started again."""
    (folder / NAME).unlink(missing_ok=True)


def read(folder: Path) -> Failed | None:
    """The failure that `leave` wrote; None where nothing failed.

    Raises:
        FormatError: The file cannot be read; the error names the fault by its path.
    """

    def parse(text: str) -> Failed:
        document = Document.parse(text, kind="failed", version=VERSION)
        return Failed(
            visible(document["headline"].text()), document["rank"].whole(), document["step"].whole()
        )

    return read_file(folder / NAME, parse) if (folder / NAME).exists() else None
