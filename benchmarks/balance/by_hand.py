"""Equally many blocks on each process, placed by hand with `weft.set_partition`: what a user does who measures nothing.

What is not a block goes with the next block of the module that holds it (an embedding, a layer that halves the
picture), or after the last one with that (a norm, a head). Modules that share a parameter go where the first of
them went.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn


def equal_blocks(root: nn.Module, blocks: str, partitions: int) -> dict[str, int]:
    """The partition of each module that is placed, by name: blocks whole, and the largest modules between them.

    >>> net = nn.ModuleDict({"embed": nn.Linear(1, 1), "blocks": nn.Sequential(nn.Tanh(), nn.ReLU())})
    >>> equal_blocks(net, r"^blocks\\.\\d+$", 2)
    {'embed': 0, 'blocks.0': 0, 'blocks.1': 1}
    """
    order = list(_order(root, "", re.compile(rf"(?:{blocks})$")))
    count = sum(is_block for _, is_block, _ in order)
    if count < partitions:
        raise ValueError(f"{count} modules match {blocks}, there must be at least {partitions}")
    found: dict[str, int] = {}
    owner: dict[int, int] = {}
    seen = 0
    for name, is_block, before_block in order:
        at = min(seen if is_block or before_block else seen - 1, count - 1) * partitions // count
        seen += is_block
        shared = [owner[id(p)] for p in root.get_submodule(name).parameters() if id(p) in owner]
        found[name] = at = shared[0] if shared else at
        owner.update((id(p), at) for p in root.get_submodule(name).parameters())
    return found


def _order(module: nn.Module, name: str, blocks: re.Pattern[str]) -> Iterator[tuple[str, bool, bool]]:
    """In order of registration: name, whether it is a block, whether a block follows in the module that holds it."""
    children = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
    holds = [
        any(blocks.search(f"{path}{dot}{inner}") for inner, dot in _inside(part)) for path, part in children
    ]
    for number, (path, part) in enumerate(children):
        if blocks.search(path):
            yield path, True, True
        elif holds[number]:
            yield from _order(part, path, blocks)
        else:
            yield path, False, any(holds[number:])


def _inside(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The names in a module, its own included, each with what joins it to the name of the module."""
    return ((name, "." if name else "") for name, _ in module.named_modules())
