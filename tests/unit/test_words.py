"""The field's words: riddles that were retired stay out of names, log lines, errors, docstrings and pages."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"

NAMES = {
    "add_up": 0, "added_up": 0, "put_together": 0, "together": 0, "in_parts": 0, "as_whole": 0, "wholes": 0,
    "sharers": 0, "lane": 0, "tracks": 0, "deal": 0, "deals": 0, "dealt": 0, "stand_in": 0, "stand_ins": 0,
    "told": 11,
}  # fmt: skip
"""Names in the source that say nothing to a reader new to weft, and how many are left of each: these numbers only fall.
The field says all-reduce, all-gather, shard, full tensor, sharding group, queue, channel, zigzag, placeholder."""

TEXTS = {
    "put together": 0, "in parts": 1, "added up": 1, "handed out": 0, "dealt": 1, "stand-in": 0, "sharers": 0,
    "copies of the model": 0, "copies of a model": 0, "deciding rank": 0, "whole tensors?": 0, "foreign": 0,
    "told": 3, "tells?": 5,
}  # fmt: skip
"""The same of words in texts: docstrings, comments, log lines, errors, pages of the documentation."""


def found_in_source() -> tuple[Counter[str], Counter[str]]:
    names: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME:
                names[token.string.strip("_").lower()] += 1
            elif token.type in (tokenize.STRING, tokenize.COMMENT):
                texts.update(in_text(re.sub(r"\bfor .{0,60}? in parts\b", "", token.string)))
    return names, texts


def in_text(text: str) -> dict[str, int]:
    words = " ".join(text.split()).lower()
    return {word: len(re.findall(rf"\b{word}\b", words)) for word in TEXTS}


NAMES_FOUND, TEXTS_FOUND = found_in_source()
for page in DOCS.rglob("*.md"):
    TEXTS_FOUND.update(in_text(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("word", NAMES)
def test_no_retired_word_comes_back_as_a_name(word: str):
    assert NAMES_FOUND[word] <= NAMES[word], "take the field's word; see docs/words.md"


@pytest.mark.parametrize("word", TEXTS)
def test_no_retired_word_comes_back_in_a_text(word: str):
    assert TEXTS_FOUND[word] <= TEXTS[word], "take the field's word; see docs/words.md"
