"""One rank's part of a save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Part:
    """Tensors by path, and JSON by section."""

    tensors: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)
