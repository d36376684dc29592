"""Reading the graph that `weft partition` and `weft simulate` are given."""

from __future__ import annotations

from weft.graph import Graph, read_profile
from weft.untrusted import read_file


def read_graph(path: str) -> Graph:
    """The graph in a file: weft's JSON if it begins with a brace or bracket, else a profile.

    Raises:
        FormatError: If there is no such file, or it is neither.
    """
    return read_file(path, _parse)


def _parse(text: str) -> Graph:
    return Graph.from_json(text) if text.lstrip()[:1] in ("{", "[") else read_profile(text)
