"""The outcomes of a program: the words for them, and the errors that they stand for."""

from __future__ import annotations

import gc
import linecache
import traceback
from collections.abc import Callable
from typing import Any

from weft.errors import PeerError, StallError, VerifyError, WeftError

EQUAL, REFUSED, DIFFERS, CRASHED, STUCK, INVALID = (
    "equal",
    "refused",
    "differs",
    "crashed",
    "stuck",
    "invalid",
)
FILE = "<program>"


def compiled(source: str) -> dict[str, Any]:
    """The names of a program's source; tracebacks show its lines."""
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, FILE, "exec"), names)
    return names


def judged(run: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """The outcome of a program that ``run`` runs with weft and compares, and the words for it."""
    try:
        return run()
    except StallError as error:
        return STUCK, f"{error}"
    except PeerError as error:
        return "", f"{error}"
    except VerifyError as error:
        return DIFFERS, f"weft says so: {error}"
    except WeftError as error:
        return REFUSED, f"{type(error).__name__}: {error}"
    except Exception:
        return CRASHED, traceback.format_exc(limit=-14)
    finally:
        gc.collect()
