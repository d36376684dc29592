"""Input that weft did not make itself: texts, files and numbers, none of which is believed before it was looked at.

    translated    the one boundary: whatever goes wrong inside becomes one of weft's own errors, in one sentence
    read_text     a file's text, of limited size
    read_limited  an open file's bytes, of limited size
    parse_json    JSON that is neither too long nor too deep, from whoever wrote it
    whole         a whole number of limited size
    shown         any value, short enough for a message

The limits stand here and nowhere else. Each is far above what training needs, and far below what would
fill a memory: a number in a file sizes nothing before it was compared with one of them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from weft.errors import FormatError, WeftError

T = TypeVar("T")

LARGEST = (1 << 63) - 1
"""No whole number in a file is larger: bytes, steps and offsets of 64 bits."""
MOST_RANKS = 1_000_000
"""Ranks of a job, partitions, stages, microbatches: whatever is counted one by one."""
MOST_STAGES = 100_000
"""Stages of a schedule that a command is asked for: partitions times chunks."""
MOST_ACTIONS = 1_000_000
"""Stages times microbatches of a step that a command is asked to simulate."""
MOST_DIMS = 64
"""Dims of a tensor."""
MOST_VALUES = 5_000_000
"""Values in one JSON document. A checkpoint has about ten for each tensor, a timeline eleven for each span."""
TEXT_LIMIT_BYTES = 1 << 28
"""Bytes of one text file."""

_LONGEST, _LONGEST_PATH = 80, 300
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _LONGEST


@contextmanager
def translated(
    what: str,
    kind: type[WeftError] = FormatError,
    remedy: str = "",
    also: type[BaseException] = Exception,
) -> Iterator[None]:
    """Errors that are raised inside become a `kind`: "`what`: reason; `remedy`". Those of weft pass as they are.

    Args:
        what: What was being read, and the fault that this is if it fails: "x.json is no index".
        kind: Which of weft's errors.
        remedy: What to do about it.
        also: An error of another library that is no `Exception`.

    >>> with translated("WIDTH is not a number", remedy="write WIDTH=3"):
    ...     int("three")
    Traceback (most recent call last):
    weft.errors.FormatError: WIDTH is not a number (invalid literal for int() with base 10: 'three'); write WIDTH=3
    """
    try:
        yield
    except WeftError:
        raise
    except (Exception, also) as error:
        raise kind(f"{what} ({reason(error)})" + (f"; {remedy}" if remedy else "")) from error


def reason(error: BaseException) -> str:
    """Why something failed, in one line.

    >>> reason(MemoryError()), reason(UnicodeDecodeError("utf-8", b"a\\xff", 1, 2, "invalid start byte"))
    ('it needs more memory than there is', 'it is not text in UTF-8: byte 1 is wrong')
    """
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8: byte {error.start} is wrong"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return "it holds a number of thousands of digits"
    first = cut(next(iter(str(error).strip().splitlines()), ""), 300)
    if first and not isinstance(error, KeyError):
        return first
    return f"{type(error).__name__} {first}".strip()


def regular(path: Path) -> Path:
    """The path, if a file is there; a pipe could be waited at for ever, and a device has no end.

    >>> regular(Path("/dev/zero"))
    Traceback (most recent call last):
    ValueError: it is no regular file
    """
    path.stat()  # the error that there is none
    if not path.is_file():
        raise ValueError("it is no regular file")
    return path


def read_limited(file: BinaryIO, limit_bytes: int) -> bytes:
    """The bytes of an open file; of one that is longer than `limit_bytes`, more bytes than that, but not all.

    Memory is taken for what is there: one `file.read(limit_bytes)` would take the whole limit at once.
    """
    parts, size = [], 0
    while size <= limit_bytes and (part := file.read(4 << 20)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def read_text(path: str | Path, limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """The text of a file.

    Raises:
        FormatError: It cannot be read, is longer than `limit_bytes`, or is no text.
    """
    with translated(f'"{shown_path(path)}" cannot be read'):
        with open(path, "rb") as file:
            content = read_limited(file, limit_bytes)
        if len(content) > limit_bytes:
            raise FormatError(
                f'"{path}" has more than {limit_bytes} bytes, which no file of its kind needs: is it the right one?'
            )
        return content.decode("utf-8")


def read_file(path: str | Path, parse: Callable[[str], T]) -> T:
    """The value that ``parse`` makes of the text of a file.

    Raises:
        FormatError: The file cannot be read, or ``parse`` refuses its text; the error names the file.
    """
    text = read_text(path)
    try:
        return parse(text)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def parse_json(text: str, fault: str = "the text is not JSON") -> Any:
    """The value of a JSON text, which may come from anywhere; `fault` begins the error where there is none.

    Raises:
        FormatError: It is not JSON, has more than `MOST_VALUES` values, is nested too deeply, or holds a number of
            thousands of digits.

    >>> parse_json('{"a": [1, 2]}'), parse_json("[" * 10**6)
    Traceback (most recent call last):
    weft.errors.FormatError: the text is not JSON (it is nested too deeply)
    """
    with translated(fault):
        if too_much := excess(text):
            raise ValueError(too_much)
        return json.loads(text)


def excess(text: str) -> str:
    """Why a JSON text is too large to be read back; empty if it is not."""
    if len(text) > TEXT_LIMIT_BYTES:
        return f"it has more than {TEXT_LIMIT_BYTES} characters"
    values = sum(map(text.count, ",[{")) if len(text) > MOST_VALUES else 0
    return (
        f"it has about {values} values, and more than {MOST_VALUES} are not read"
        if values > MOST_VALUES
        else ""
    )


def whole(text: str, most: int = LARGEST) -> int | None:
    """The number that a text of digits is; None if it is no such text, or one above `most`.

    >>> whole("12"), whole("-1"), whole("9" * 5000), whole("7", most=6), whole("\\N{SUPERSCRIPT TWO}")
    (12, None, None, None, None)
    """
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(LARGEST)):
        return None
    value = int(text)
    return value if value <= most else None


def shown(value: object) -> str:
    """`repr(value)`, with its middle left out where it is long.

    >>> shown("two"), shown(10**5000)
    ("'two'", 'a number of more than 80 digits')
    """
    if isinstance(value, int) and value.bit_length() > 265:
        return f"a number of more than {_LONGEST} digits"
    try:
        return _short.repr(value)
    except Exception:  # somebody else's code
        return f"a {type(value).__name__}"


def shown_text(text: str) -> str:
    """A text, cut where it is long, without characters that are halves of others."""
    return cut(text, _LONGEST).encode(errors="backslashreplace").decode()


def shown_path(path: object) -> str:
    """A path, the beginning left out where it is long: files differ by its end.

    >>> shown_path("/" + "a" * 400 + "/x.json")[-9:], len(shown_path("a" * 400))
    ('aa/x.json', 300)
    """
    text = str(path).encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST_PATH else f"...{text[3 - _LONGEST_PATH :]}"


def cut(text: str, most: int) -> str:
    """The first `most` characters, with dots for the rest.

    >>> cut("abcdefgh", 6)
    'abc...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(names: Iterable[object], most: int = 8) -> str:
    """The first of many names, for a message.

    >>> listed(range(5), most=2)
    '0, 1 and others'
    """
    found: list[str] = []
    for name in names:
        if len(found) == most:
            return f"{', '.join(found)} and others"
        found.append(shown_text(str(name)))
    return ", ".join(found)
