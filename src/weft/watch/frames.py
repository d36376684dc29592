"""A traceback as the author of a script needs it: the script's own line first, and no frames of weft's."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator

from weft.errors import is_own, is_weft

WHOLE = "WEFT_TRACEBACK"
"""Variable: set, tracebacks have weft's own frames, too."""
_SHORT = 4
"""The own line in a traceback of so many frames is found at once."""


def own_line(error: BaseException, always: bool = False) -> str:
    """The innermost line that is neither weft's nor a library's; empty if there is none, or if the traceback is so
    short that it is found at once (unless ``always``)."""
    frames = traceback.extract_tb(error.__traceback__)
    if always or len(frames) > _SHORT:
        found = (one_line(frame) for frame in reversed(frames) if is_own(frame.filename))
        return next(found, "")
    return ""


def one_line(frame: traceback.FrameSummary) -> str:
    """A frame in one line: file, number, function and code."""
    code = f": {frame.line}" if frame.line else ""
    return f"at {frame.filename}, line {frame.lineno}, in {frame.name}{code}"


def own_traceback(error: BaseException, says_all: bool) -> str:
    """The traceback of an exception and of those behind it, without weft's frames; with them where weft itself failed.

    ``says_all``: the message says what is wrong with the script. Then the traceback ends with the script's own line,
    and is empty if it would have only that.
    """
    shown = traceback.TracebackException.from_exception(error)
    if os.environ.get(WHOLE):
        return "".join(shown.format())
    left_out = False
    for each, outer in _chain(shown, says_all):
        kept = _kept(each.stack, outer)
        left_out |= len(kept) < len(each.stack)
        each.stack = traceback.StackSummary.from_list(kept)
    note = f"weft's own lines are left out; {WHOLE}=1 shows them\n" if left_out else ""
    if says_all and left_out and shown.__cause__ is None and shown.__context__ is None:
        frames = shown.stack.format() if len(shown.stack) > 1 else []
        return "".join(["Traceback (most recent call last):\n", *frames]) * bool(frames) + note
    return "".join(shown.format()) + note


def _chain(
    shown: traceback.TracebackException, says_all: bool
) -> Iterator[tuple[traceback.TracebackException, bool]]:
    """An exception and those behind it, and whether the message of each says what is wrong."""
    yield shown, says_all
    for behind in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        if behind is not None:
            yield from _chain(behind, False)


def _kept(frames: traceback.StackSummary, says_all: bool) -> list[traceback.FrameSummary]:
    own = [number for number, frame in enumerate(frames) if is_own(frame.filename)]
    if not own or (is_weft(frames[-1].filename) and not says_all):
        return list(frames)
    return [frame for frame in frames[: own[-1] + 1 if says_all else None] if not is_weft(frame.filename)]
