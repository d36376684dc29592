"""Every exception that weft raises on purpose, and whose line a warning names.

    WeftError
    +-- ConfigError      (ValueError)  a setting is unknown, of the wrong type, or contradicts another
    +-- FormatError      (ValueError)  a text, a file or a record cannot be read as what it should be
    +-- SplitError       (ValueError)  a mini-batch cannot be cut into microbatches
    +-- PlacementError   (ValueError)  units cannot be put on the partitions that were asked for
    +-- ScheduleError    (ValueError)  a list of actions is not legal
    +-- UsageError                     a function was called in the wrong place or order
    +-- LaunchError                    the processes of a job could not be started
    +-- JobError                       a job that was started from Python failed
    +-- TransportError                 a tensor could not be moved
    +-- CheckpointError                a checkpoint cannot be written, or none that is whole can be read
    +-- DivergenceError                ranks run different programs, settings, models or inputs
    +-- VerifyError                    the step that was split gives other numbers than one process does
    +-- PeerError                      another rank failed
    +-- StallError                     a rank waited too long for another one

`except WeftError` catches them all. Errors in the user's values are ValueErrors too.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings

_WEFT = __file__.removesuffix("errors.py")
_LIBRARIES = ("<", _WEFT, f"{sysconfig.get_paths()['stdlib']}/")
_INSTALLED = "/site-packages/", "/dist-packages/"


class WeftError(Exception):
    """The root of the tree."""


class ConfigError(WeftError, ValueError):
    """A setting is unknown, of the wrong type or out of range, or contradicts another one."""


class FormatError(WeftError, ValueError):
    """A text, a file or a record cannot be read as what it should be."""


class SplitError(WeftError, ValueError):
    """A mini-batch cannot be cut into microbatches."""


class PlacementError(WeftError, ValueError):
    """Units cannot be put on the partitions that were asked for."""


class ScheduleError(WeftError, ValueError):
    """A list of actions is not legal."""


class UsageError(WeftError):
    """A function was called in the wrong place or in the wrong order."""


class LaunchError(WeftError):
    """The processes of a job could not be started."""


class JobError(WeftError):
    """A job that was started from Python failed.

    Attributes:
        code: Its exit code.
        rank: The rank to blame, if that is known.
    """

    def __init__(self, text: str, code: int, rank: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.rank = rank


class TransportError(WeftError):
    """A tensor could not be moved from one rank to another."""


class CheckpointError(WeftError):
    """A checkpoint cannot be written, or what was found is incomplete, altered or not to be trusted."""


class DivergenceError(WeftError):
    """The ranks ran different programs, or were started with different settings, models or inputs."""


class VerifyError(WeftError):
    """The step that was split gives other numbers than one process does."""


class PeerError(WeftError):
    """Another rank failed.

    Attributes:
        rank: The rank that failed.
        text: What that rank reported.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.text}"


class StallError(WeftError):
    """A rank waited for another one for longer than ``wait_timeout``."""


def is_weft(file: str) -> bool:
    """True if a line of this file is weft's."""
    return file.startswith(_WEFT)


def is_own(file: str) -> bool:
    """True if a line of this file is the script's own: neither weft's nor a library's.

    >>> is_own("/home/me/train.py"), is_own("<string>"), is_own(__file__)
    (True, False, False)
    """
    return not file.startswith(_LIBRARIES) and not any(part in file for part in _INSTALLED)


def warn(text: str) -> None:
    """Warn at the innermost line that is the script's own, or at the innermost one that is not weft's."""
    files: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    levels = dict(reversed([*((is_own(file), level) for level, file in enumerate(files, 2))]))
    outside = next((level for level, file in enumerate(files, 2) if not is_weft(file)), 2)
    warnings.warn(text, stacklevel=levels.get(True, outside))
