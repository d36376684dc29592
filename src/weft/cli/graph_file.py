"""Reading the graph that `weft partition` and `weft simulate` are given."""

from __future__ import annotations

from weft.errors import FormatError
from weft.foreign import read_text
from weft.graph import Graph, read_profile


def read_graph(path: str) -> Graph:
    """The graph in a file: weft's JSON if it begins with a brace or bracket, else a profile.

    Raises:
        FormatError: If there is no such file, or it is neither.
    """
    text = read_text(path)
    try:
        return Graph.from_json(text) if text.lstrip()[:1] in ("{", "[") else read_profile(text)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
