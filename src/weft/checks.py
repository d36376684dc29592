"""Checks of settings: kinds of values, each with the name of its type and a text that says what is allowed."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.untrusted import MOST_RANKS


@dataclass(frozen=True)
class Whole:
    """A whole number of at least `minimum`, and not so large that counting to it would fill a memory."""

    minimum: int
    most: int = MOST_RANKS
    name = "int"

    def accepts(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.minimum <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.minimum} to {self.most}"


@dataclass(frozen=True)
class WholeOrWord:
    """A whole number as in `Whole`, or a word that leaves it open."""

    minimum: int
    word: str

    @property
    def name(self) -> str:
        return f'int | "{self.word}"'

    def accepts(self, value: object) -> bool:
        return value == self.word or Whole(self.minimum).accepts(value)

    def __str__(self) -> str:
        return f'{Whole(self.minimum)}, or "{self.word}"'


@dataclass(frozen=True)
class Number:
    """A number between two limits."""

    above: float
    limit: float = math.inf
    open_below: bool = False
    name = "float"

    def accepts(self, value: object) -> bool:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        if not abs(value) <= sys.float_info.max:  # neither nan nor a whole number that no float can be
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
    """One of a few words.

    Attributes:
        words: The words that are shown.
        second_names: Other names that are taken, and the word that each means.
    """

    words: tuple[str, ...]
    second_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " | ".join(f'"{word}"' for word in self.words)

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and self.word_of(value) in self.words

    def word_of(self, value: str) -> str:
        """The word that a name means; other texts as they are.

        >>> Choice(("whole", "half"), {"full": "whole"}).word_of("full")
        'whole'
        """
        return self.second_names.get(value, value)

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


@dataclass(frozen=True)
class Steps:
    """Steps of a run: `all`, or some of `first 20`, `every 10`, `100-200` and `outliers`, with commas between them."""

    name = "str"

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and all(STEPS.fullmatch(part.strip()) for part in value.split(","))

    def __str__(self) -> str:
        return "all, none, or some of first 20, every 10, 100-200 and outliers, with commas between them"


@dataclass(frozen=True)
class Speeds:
    """Speeds of the devices of partitions beside each other: a word, or numbers with commas between them."""

    words: tuple[str, ...]
    name = "str"

    def accepts(self, value: object) -> bool:
        if not isinstance(value, str):
            return False
        return value in self.words or all(
            SPEED.fullmatch(part.strip()) and float(part) > 0 for part in value.split(",")
        )

    def __str__(self) -> str:
        words = ", ".join(f'"{word}"' for word in self.words)
        return f'{words}, or a number above 0 for each partition ("1, 0.5")'


SPEED = re.compile(r"\d{1,9}(\.\d{0,9})?")
STEPS = re.compile(r"first (\d{1,9})|every (\d{1,9})|(\d{1,9})-(\d{1,9})|(outliers)|(all)|none")
"""One part of what says which steps."""

Check = Whole | WholeOrWord | Number | Flag | Choice | Text | Steps | Speeds
