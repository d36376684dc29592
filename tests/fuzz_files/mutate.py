"""What is done to a valid file: bits, slices, numbers, brackets, JSON values, the file itself."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NUMBERS = [
    "0", "-1", "1", "2", "7", "64", "255", "65536", "1000001", "2147483648", "4294967295", "99999999999",
    "9223372036854775807", "18446744073709551616", "9" * 400, "9" * 5000, "1e400", "-1e400", "1e308", "0.5", "NaN",
    "Infinity", "\N{SUPERSCRIPT TWO}", "0x10", "1_000",
]  # fmt: skip
WORDS = [
    "null", "true", "[]", "{}", '""', '"\\ud800"', '{"$tensor": "model/0.weight"}', '{"$float": "x"}', "../..",
    "/dev/zero",
    "\0", "\r\n", "\x1b[2J", "\N{BYTE ORDER MARK}", ",", "=", ";", "(x99999999)", "[1-99999999999]", "GiB", "1e400GiB",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1 << 31, 1 << 63, 10**400, 1.5, 1e308, "", "x", "9" * 400, "\ud800", "../x", [], [[]], {},
    {"a": 1},
    {"$tensor": "x"}, {"$tuple": 3}, {"$numpy": ["model/0.weight", "f8", [1 << 40]]}, {"$pickle": "gA=="},
    {"$dict": [[[], 1]]},
]  # fmt: skip
BRACKETS = 100_000


def mutated(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """The content with one to three changes, and what they were."""
    told = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = draw.choice(CHANGES)
        content = change(content, draw)
        told.append(change.__name__)
    return content, ", ".join(told)


def at(content: bytes, draw: random.Random) -> int:
    return draw.randrange(len(content) + 1)


def slice_of(content: bytes, draw: random.Random) -> tuple[int, int]:
    begin = at(content, draw)
    return begin, min(len(content), begin + draw.choice((1, 2, 4, 8, 16, 64, 512)))


def flip_a_bit(content: bytes, draw: random.Random) -> bytes:
    if not content:
        return b"\x80"
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def set_a_byte(content: bytes, draw: random.Random) -> bytes:
    begin = at(content, draw)
    return (
        content[:begin]
        + bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))])
        + content[begin + 1 :]
    )


def truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: at(content, draw)]


def delete(content: bytes, draw: random.Random) -> bytes:
    begin, end = slice_of(content, draw)
    return content[:begin] + content[end:]


def repeat(content: bytes, draw: random.Random) -> bytes:
    begin, end = slice_of(content, draw)
    return content[:begin] + content[begin:end] * draw.choice((2, 3, 100)) + content[end:]


def exchange(content: bytes, draw: random.Random) -> bytes:
    a, b = slice_of(content, draw)
    c, d = slice_of(content, draw)
    if b > c:
        return content[:a] + content[c:d] + content[b:]
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def zeros(content: bytes, draw: random.Random) -> bytes:
    begin, end = slice_of(content, draw)
    return content[:begin] + bytes(end - begin) + content[end:]


def insert_a_word(content: bytes, draw: random.Random) -> bytes:
    begin = at(content, draw)
    return content[:begin] + draw.choice(WORDS + NUMBERS).encode() + content[begin:]


def insert_brackets(content: bytes, draw: random.Random) -> bytes:
    begin = at(content, draw)
    return content[:begin] + draw.choice((b"[", b"{", b'{"a":', b"(", b'"')) * BRACKETS + content[begin:]


def another_number(content: bytes, draw: random.Random) -> bytes:
    found = list(re.finditer(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", content))
    if not found:
        return insert_a_word(content, draw)
    one = draw.choice(found)
    return content[: one.start()] + draw.choice(NUMBERS).encode() + content[one.end() :]


def another_integer(content: bytes, draw: random.Random) -> bytes:
    size, form = draw.choice(((2, "<H"), (4, "<I"), (8, "<Q"), (8, "<d")))
    begin = at(content, draw)
    if form == "<d":
        value = struct.pack(form, draw.choice((float("nan"), float("inf"), 1e308, -1.0, 0.0)))
    else:
        top = 1 << (8 * size)
        value = struct.pack(form, draw.choice((0, 1, top - 1, top // 2, top // 2 - 1)))
    return content[:begin] + value + content[begin + size :]


def another_value(content: bytes, draw: random.Random) -> bytes:
    """In JSON: one value is replaced, removed or written twice."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return another_number(content, draw)
    places = list(_places(document))
    if not places:
        return json.dumps(draw.choice(VALUES)).encode()
    holder, key = draw.choice(places)
    how = draw.randrange(4)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif how == 2:
        other, name = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else None
    else:
        holder[key] = draw.choice(VALUES)
    return json.dumps(document).encode()


def _keys(holder: Any) -> Sequence[Any]:
    return list(holder) if isinstance(holder, dict) else range(len(holder))


def _places(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        for key in _keys(value):
            yield value, key
            yield from _places(value[key])


CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_a_bit, flip_a_bit, set_a_byte, truncate, delete, repeat, exchange, zeros, insert_a_word, insert_brackets,
    another_number, another_number, another_integer, another_value, another_value, another_value,
)  # fmt: skip


NO_FILES = ("arguments", "environment", "message.json")
"""These stand for what comes in other ways."""


def mutate_file(path: Path, draw: random.Random) -> str:
    """Change a file; in one of twenty cases what it is. What was done."""
    if draw.random() < 0.05 and path.name not in NO_FILES:
        change = draw.choice(FILES)
        path.unlink()
        change(path)
        return f"{change.__name__} {path.name}"
    content, told = mutated(path.read_bytes(), draw)
    path.write_bytes(content)
    return f"{told} in {path.name}"


def gone(path: Path) -> None:
    """There is no such file."""


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.mkdir()


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def looped(path: Path) -> None:
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def secret(path: Path) -> None:
    path.chmod(0) if path.exists() else path.write_bytes(os.urandom(1000))


FILES: tuple[Callable[[Path], None], ...] = (gone, empty, folder, endless, looped, pipe, secret)


def copy_of(sample: Path, target: Path) -> Path:
    shutil.copytree(sample, target, symlinks=True)
    return target
