"""Values that a script says, one line of JSON each time: ``{"step": 3, "time": 1700000000.0, "values": {...}}``."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from weft.errors import UsageError
from weft.untrusted import shown_path


class ValueFile:
    """A file of one job in a folder; made with the first values.

    Raises:
        UsageError: The folder cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self.path.open("x", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"values cannot be written to {shown_path(folder)}: {error.strerror}. Name another folder: weft run "
                "--log-dir FOLDER, or the setting log_dir"
            ) from error

    def add(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write them now, so that they are there if the job is killed; what is no finite number is written as text."""
        safe = {
            name: value if isinstance(value, str) or math.isfinite(value) else str(value)
            for name, value in values.items()
        }
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), "values": safe}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()
