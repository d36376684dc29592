"""``smp.amp.GradScaler``."""

from typing import Any

from weft.compat.later import later
from weft.compat.refused import refuse_unknown


def __getattr__(name: str) -> Any:
    if name == "GradScaler":
        return later(name)
    return refuse_unknown(__name__, name)
