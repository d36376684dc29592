"""Worker: runs checks of behaviour on its ranks.

By hand, from the root of the repository:

    PYTHONPATH=. python -m weft run -n 2 tests/parity/run_checks.py skip_connections
"""

from __future__ import annotations

from typing import Any

from tests.parity.checks.registry import CHECKS
from tests.parity.worker import arguments, work


def run_check(name: str, partitions: int) -> tuple[str, dict[str, Any]]:
    """An assertion that fails ends the job: the other rank may be in another step by then."""
    return "", {"agree": CHECKS[name]()}


if __name__ == "__main__":
    work(arguments(list(CHECKS)), run_check)
