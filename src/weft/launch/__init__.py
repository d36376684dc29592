"""A job: which processes it has, how they find each other, and who ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.launch.job import Job as Job

__all__ = ["Job"]


def __getattr__(name: str) -> Any:
    """`Job`, when it is asked for: ranks import this room, and need nothing of engines."""
    if name == "Job":
        from weft.launch.job import Job

        return Job
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
