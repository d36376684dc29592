"""What a setting may be: kinds of values, each with the name of its type and a text that says what is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Whole:
    """A whole number of at least `minimum`."""

    minimum: int
    name = "int"

    def accepts(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= self.minimum

    def __str__(self) -> str:
        return f"a whole number of at least {self.minimum}"


@dataclass(frozen=True)
class Number:
    """A number between two limits."""

    above: float
    limit: float = math.inf
    open_below: bool = False
    name = "float"

    def accepts(self, value: object) -> bool:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return (value > self.above if self.open_below else value >= self.above) and value <= self.limit

    def __str__(self) -> str:
        if math.isfinite(self.limit):
            return f"a number from {self.above:g} to {self.limit:g}"
        return f"a number {'above' if self.open_below else 'of at least'} {self.above:g}"


@dataclass(frozen=True)
class Flag:
    """True or False."""

    name = "bool"

    def accepts(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return " | ".join(f'"{word}"' for word in self.words)

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return "one of " + ", ".join(f'"{word}"' for word in self.words)


@dataclass(frozen=True)
class Text:
    """Any text."""

    name = "str"

    def accepts(self, value: object) -> bool:
        return isinstance(value, str)

    def __str__(self) -> str:
        return "a text"


Check = Whole | Number | Flag | Choice | Text
