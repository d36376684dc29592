"""Machines as they are asked for: `4x8xA100-80`, `16xp4d.24xlarge`, `2xmine.json`."""

from __future__ import annotations

from collections.abc import Callable

from weft.errors import ConfigError
from weft.machines.catalogue import INSTANCES, host_of
from weft.machines.host import Host, Machines
from weft.untrusted import MOST_RANKS, shown_text, whole

EXAMPLE = "4x8xA100-80"


def parse_cluster(text: str, read: Callable[[str], Host] | None = None) -> Machines:
    """Machines from `HOSTSxEACHxACCELERATOR`, `HOSTSxINSTANCE` or `HOSTSxFILE.json`; one host if HOSTS is left out.

    Args:
        text: What was asked for.
        read: How a machine file is read.

    Raises:
        ConfigError: It is none of these.

    >>> parse_cluster("4x8xA100-80").size, parse_cluster("2xp5.48xlarge").host.accelerator.name
    (32, 'H100')
    """
    parts = text.split("x")
    counts: list[int] = []
    while len(parts) > 1 and len(counts) < 2 and (count := whole(parts[0], MOST_RANKS)):
        counts.append(count)
        del parts[0]
    name = "x".join(parts)
    kind = name.lower().removeprefix("standard_")
    if name.endswith(".json") and read is not None:
        host = read(name)
    elif kind in INSTANCES:
        host = INSTANCES[kind](kind)
    else:
        host = host_of(name, counts.pop() if counts else 1)
    if len(counts) == 2:
        raise ConfigError(
            f'"{shown_text(text)}" counts accelerators twice: "{host.name}" has {host.accelerators}, write for example '
            f"{counts[0]}x{name}"
        )
    machines = Machines(host, counts[0] if counts else 1)
    if machines.size > MOST_RANKS:
        raise ConfigError(f'"{shown_text(text)}" has {machines.size} accelerators: give up to {MOST_RANKS}')
    return machines
