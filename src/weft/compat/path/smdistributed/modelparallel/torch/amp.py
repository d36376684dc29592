"""``smp.amp.GradScaler``."""

from typing import Any

from weft.compat.later import later


def __getattr__(name: str) -> Any:
    if name == "GradScaler":
        return later(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
