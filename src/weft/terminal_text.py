"""Texts from elsewhere, as they may be shown: names of modules, hosts and files, messages of errors.

A terminal obeys control characters, and shows text in another order after a mark for it; a file of UTF-8 cannot hold
half of a pair of surrogates. This is the one place that decides what of a text is shown as it is.
"""

from __future__ import annotations

import logging

LINES = "\n\t"


def visible(text: str, keep: str = "") -> str:
    """`text` with everything that cannot be seen written out, but for the characters to `keep`.

    >>> print(visible("layers.0\\x1b[2J"), visible("\\u202egnp.exe"), visible("\\ud800"))
    layers.0\\x1b[2J \\u202egnp.exe \\ud800
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def keep_log_visible() -> None:
    """From now on weft's log shows names so; again does nothing."""
    logging.getLogger("weft").addFilter(_visible_record)


def _visible_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage(), LINES), ()
    return True
