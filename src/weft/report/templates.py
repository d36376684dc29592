"""Where pages come from templates: Jinja's, with autoescape, and whatever they show also goes through `visible`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.errors import UsageError
from weft.report.page import asset
from weft.report.run.labels import number, percent, sentence
from weft.terminal_text import LINES, visible

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(of: str, instead: str) -> Environment:
    """The templates in this room's `static`, with filters for texts and figures.

    Args:
        of: Whose page is made, for the message of an error.
        instead: What is read without one.

    Raises:
        UsageError: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ImportError:
        raise UsageError(
            f"the page of {of} is made with Jinja2, which is not installed: pip install 'weft[report]', or leave out "
            f"--html to read {instead} as text"
        ) from None

    found = Environment(
        loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined, finalize=_shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {"code": _code, "figure": _figure, "percent": percent, "sentence": sentence}
    return found


def _shown(value: Any) -> Any:
    """The text that a template writes: of a text from outside, what cannot be seen is written out."""
    is_markup = hasattr(value, "__html__")
    return visible(value, LINES) if isinstance(value, str) and not is_markup else value


def _code(text: str) -> Any:
    """A sentence in which what stands in backticks is code."""
    from markupsafe import Markup, escape  # comes with Jinja2

    pieces = visible(text).split("`")
    if len(pieces) % 2 == 0:
        return "`".join(pieces)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if place % 2 else escape(piece)
        for place, piece in enumerate(pieces)
    )


def _figure(value: Any) -> str:
    """A piece of evidence."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_figure, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_figure(each)}" for name, each in value.items())
    return number(value)
