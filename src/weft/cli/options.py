"""Options that several commands take: a graph's file, and a machine's memory, speeds and links."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from weft.errors import ConfigError
from weft.graph import Graph, read_profile
from weft.simulate import FREE, Links
from weft.topology.cluster import Cluster, Link
from weft.untrusted import MOST_ACTIONS, MOST_RANKS, MOST_STAGES, read_file, shown_text, whole


def read_graph(path: str) -> Graph:
    """The graph in a file: weft's JSON if it begins with a brace or bracket, else a profile.

    Raises:
        FormatError: If there is no such file, or it is neither.
    """
    return read_file(
        path,
        lambda text: Graph.from_json(text) if text.lstrip()[:1] in ("{", "[") else read_profile(text),
    )


T = TypeVar("T")


def count(text: str, most: int = MOST_RANKS) -> int:
    """A whole number on a command line, for `argparse`; one that nobody could count to is refused."""
    value = whole(text.removeprefix("-"), most)
    if value is None:
        raise argparse.ArgumentTypeError(f"'{shown_text(text)}' is no whole number up to {most}")
    return -value if text.startswith("-") else value


def size_faults(partitions: int, chunks: int, microbatches: int = 1) -> list[str]:
    """Faults of numbers each of which is allowed, but whose product would fill a memory."""
    stages = partitions * chunks
    if stages > MOST_STAGES:
        return [
            f"{partitions} partitions with {chunks} chunks make {stages} stages: give up to {MOST_STAGES}"
        ]
    if stages * microbatches > MOST_ACTIONS:
        return [
            f"{stages} stages and {microbatches} microbatches make {stages * microbatches} actions: give numbers "
            f"that make up to {MOST_ACTIONS}"
        ]
    return []


def each(text: str, count: int, option: str, parse: Callable[[str], T]) -> list[T]:
    """One value for each partition: as many as there are, or one for all."""
    values = [parse(part) for part in text.split(",")]
    if len(values) not in (1, count):
        raise ConfigError(f"{option} has {len(values)} values for {count} partitions: give one, or {count}")
    return values * (count // len(values))


def links(options: argparse.Namespace) -> Links:
    """Inside and between hosts, from `--link`, `--inter-link` and `--ranks-per-host`."""
    if options.link is None and options.inter_link is None:
        return FREE
    inside = Link() if options.link is None else Link.parse(options.link)
    outside = inside if options.inter_link is None else Link.parse(options.inter_link)
    size = options.ranks_per_host or options.partitions
    whole, rest = divmod(options.partitions, size)
    return Links(Cluster((size,) * whole + (rest,) * (rest > 0), inside, outside).link)
