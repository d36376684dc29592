"""JSON that is read with care: every fault is named by its path inside the document.

weft writes timelines, graphs and placements as JSON and reads them back from other ranks and from
files. A `Document` is one value together with its path; it hands out what it holds only as the
type that was asked for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from weft.errors import FormatError
from weft.untrusted import LARGEST, cut, listed, parse_json, shown, shown_text

_JSON_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


class Document:
    """A JSON value and where it stands.

    >>> unit = Document({"units": [{"name": "head"}]})["units"].items()[0]
    >>> unit["name"].text()
    'head'
    >>> unit["name"].whole()
    Traceback (most recent call last):
    weft.errors.FormatError: $.units[0].name: expected a whole number, found string "head"
    """

    def __init__(self, value: object, path: str = "$") -> None:
        self.value = value
        self.path = path

    @classmethod
    def parse(cls, text: str, *, kind: str, version: int) -> Document:
        """Read a document that weft wrote: `{"weft": kind, "version": version, ...}`."""
        document = cls(parse_json(text, f"this is not JSON, so it cannot be a {kind}"))
        if document["weft"].text() != kind:
            document["weft"].refuse(f'"{kind}"')
        found = document["version"].whole()
        if found != version:
            raise FormatError(
                f"$.version: this {kind} has version {found}, and this weft reads version {version}; "
                "write it again with the same weft that reads it"
            )
        return document

    def __getitem__(self, key: str) -> Document:
        """The member `key` of an object, which must be there."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        if key not in self.value:
            known = listed(sorted(map(str, self.value))) or "nothing"
            raise FormatError(f'{self.path}: "{key}" is missing; the object has {known}')
        return Document(self.value[key], f"{self.path}.{shown_text(key)}")

    def __contains__(self, key: str) -> bool:
        """True if an object has the member `key`."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return key in self.value

    def only(self, *known: str) -> None:
        """Refuse an object with members that nobody reads: most likely their names are misspelt."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        for key in self.value:
            if key not in known:
                raise FormatError(
                    f'{self.path}: "{shown_text(str(key))}" is unknown here; known are {", ".join(known)}'
                )

    def items(self) -> list[Document]:
        """The elements of an array."""
        if not isinstance(self.value, list):
            self.refuse("an array")
        return [Document(element, f"{self.path}[{i}]") for i, element in enumerate(self.value)]

    def __iter__(self) -> Iterator[Document]:
        return iter(self.items())

    def text(self) -> str:
        """The value as a string."""
        if not isinstance(self.value, str):
            self.refuse("a string")
        if not self.value.isascii() and any("\ud800" <= character <= "\udfff" for character in self.value):
            self.refuse("a string of whole characters")
        return self.value

    def whole(self) -> int:
        """The value as a whole number."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            self.refuse("a whole number")
        if abs(self.value) > LARGEST:
            self.refuse(f"a whole number up to {LARGEST}")
        return self.value

    def number(self) -> float:
        """The value as a finite number."""
        if not isinstance(self.value, (int, float)) or isinstance(self.value, bool):
            self.refuse("a number")
        if not abs(self.value) <= sys.float_info.max:
            self.refuse("a finite number")
        return float(self.value)

    def refuse(self, expected: str) -> NoReturn:
        """Raise the error that says what was expected here and what was found."""
        raise FormatError(f"{self.path}: expected {expected}, found {_describe(self.value)}")


def _describe(value: Any) -> str:
    text = cut(json.dumps(_beginning(value, 3), default=shown), 60)
    name = _JSON_NAMES.get(type(value), "number")
    return name if value is None else f"{name} {text}"


def _beginning(value: Any, depth: int) -> Any:
    """As much of a value as a message may show."""
    if isinstance(value, str):
        return value[:60]
    if isinstance(value, int) and abs(value) > 10**60:
        return shown(value)
    if isinstance(value, list):
        return [_beginning(item, depth - 1) for item in value[:20]] if depth else ["..."]
    if isinstance(value, dict):
        return (
            {str(key)[:60]: _beginning(value[key], depth - 1) for key in list(value)[:20]} if depth else "..."
        )
    return value
