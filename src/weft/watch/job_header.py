"""The launcher's and the ranks' messages about the job as a whole, in the header of the ranks' page.

asked     the launcher was asked to end, and wants the ranks to save before that
heeded    they will: they look at `asked` where a step ends
saves     how many checkpoints have appeared
"""

from __future__ import annotations

import struct
from mmap import mmap
from typing import Any

_NUMBER = struct.Struct("<q")


class _Field:
    """A number at a fixed place."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, course: Course, kind: Any) -> int:
        (found,) = _NUMBER.unpack_from(course.memory, self._at)
        return int(found)

    def __set__(self, course: Course, value: int) -> None:
        _NUMBER.pack_into(course.memory, self._at, value)


class Course:
    """See the module. ``memory``: that of the page, whose header has room for this from byte 24 to byte 48.

    >>> from mmap import mmap
    >>> course = Course(mmap(-1, 64))
    >>> course.saves = 3
    >>> course.saves, course.asked
    (3, 0)
    """

    asked = _Field(24)
    heeded = _Field(32)
    saves = _Field(40)

    def __init__(self, memory: mmap) -> None:
        self.memory = memory
