"""JSON as people write it by hand: with comments, and commas before a closing bracket."""

from __future__ import annotations

import re
from typing import Any

from weft.errors import FormatError
from weft.untrusted import parse_json

MOST_CHARACTERS = 1 << 20
"""No description of a job is longer."""

_STRING = r'"(?:[^"\\]|\\.?)*(?:"|\Z)'
_COMMENTS = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_COMMAS = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)


def read(text: str) -> Any:
    """The value of a JSON text that may have comments (`//`, `#`, `/* */`) and commas before `}` and `]`.

    Nothing in it is run.

    >>> read('{"a": [1, 2,], // two\\n "b": "# none",}')
    {'a': [1, 2], 'b': '# none'}

    Raises:
        FormatError: It is no JSON besides.
    """
    if len(text) > MOST_CHARACTERS:
        raise FormatError(f"the text has more than {MOST_CHARACTERS} characters: is it the right file?")
    for pattern in (_COMMENTS, _COMMAS):
        text = pattern.sub(lambda match: match[1] or "", text)
    return parse_json(text)
